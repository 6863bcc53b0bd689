import lzma
import types

import pytest

from celo2 import cli
from celo2.tasks import tokens
from celo2.tasks.datafiles import FetchError
from hub import use_hub

pytest.importorskip("tyro", reason="tyro is not installed")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{i}\n" for i in range(20_000)))
    return tmp_path / "a.txt"


def test_tokens_makes_a_folder_that_check_accepts(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setattr("celo2.commands.data.DELAY", 0)
    out = str(tmp_path / "out")
    options = ["--from", str(text), str(text), "--tokenizer", "bytes", "--tokens", "1e5"]
    assert cli.main(["data", "tokens", out, *options, "--valid-every", "4"]) == 0
    captured = capsys.readouterr()
    made = tokens.read_token_folder(out)
    assert 100_000 <= made.train.total + made.valid.total < 120_000
    assert f"{made.train.total:,} for train" in captured.out and made.checksum() in captured.out
    assert "/100k" in captured.err and "documents" in captured.err
    assert cli.main(["data", "check", out]) == 0
    assert made.checksum() in capsys.readouterr().out


def test_check_of_a_damaged_folder_is_one_line_and_status_2(tmp_path, text, capsys):
    out = tmp_path / "out"
    assert cli.main(["data", "tokens", str(out), "--from", str(text), "--tokenizer", "bytes"]) == 0
    (out / "train-00000.bin").write_bytes(bytes((out / "train-00000.bin").stat().st_size))
    capsys.readouterr()
    assert cli.main(["data", "check", str(out)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "damaged" in err


def test_existing_folder_needs_force(tmp_path, text, capsys):
    options = [str(tmp_path / "out"), "--from", str(text), "--tokenizer", "bytes"]
    assert cli.main(["data", "tokens", *options]) == 0
    assert cli.main(["data", "tokens", *options]) == 2
    assert "--force" in capsys.readouterr().err
    assert cli.main(["data", "tokens", *options, "--force"]) == 0


def test_offline_is_one_line_and_status_2(tmp_path, monkeypatch, capsys):
    use_hub(monkeypatch, types.ModuleType("datasets"), answers=False)
    options = [str(tmp_path / "out"), "--from", "fineweb-edu", "--tokenizer", "bytes"]
    assert cli.main(["data", "tokens", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("celo2: HuggingFaceFW/fineweb-edu") and err.count("\n") == 1


def fetching(calls):
    """A stand-in for `fetch` that keeps what it was asked for."""

    def fetch(folder, names, **options):
        calls.append((folder, names))
        for split in ("train", "val"):
            path = f"{folder}/wikipedia_en_{split}.txt.xz"
            with open(path, "wb") as file:
                file.write(lzma.compress(split.encode()))
        return {"wikipedia_en_train.txt.xz": "ab" * 32}

    return fetch


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (["wikipedia"], ("wikipedia",)),
        (["svhn", "wikipedia"], ("svhn", "wikipedia")),
        (["--names", "cifar10"], ("cifar10",)),
        ([], ("mnist", "fashion_mnist", "cifar10", "svhn")),
    ],
)
def test_fetch_takes_names_as_arguments_or_option(given, asked, tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("celo2.commands.data.fetch", fetching(calls))
    assert cli.main(["data", "fetch", *given, "--data", str(tmp_path)]) == 0
    assert calls == [(str(tmp_path), asked)]
    said = "is not the text of the records" in capsys.readouterr().out
    assert said == ("wikipedia" in asked)


def test_fetch_shows_downloads_and_checksums(tmp_path, monkeypatch, capsys):
    def fake(folder, names, *, full, force, report):
        assert (folder, names, full, force) == (str(tmp_path), ("mnist",), False, True)
        report("mnist: reading ylecun/mnist")
        return {"mnist_8x8.npz": "ab" * 32}

    monkeypatch.setattr("celo2.commands.data.fetch", fake)
    options = ["--names", "mnist", "--data", str(tmp_path), "--force"]
    assert cli.main(["data", "fetch", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == "mnist: reading ylecun/mnist\n"
    assert "mnist_8x8.npz" in captured.out and "ab" * 32 in captured.out


def test_fetch_offline_is_one_line(monkeypatch, capsys):
    def fake(*_, **__):
        raise FetchError("the hub does not answer:\nis this machine online?")

    monkeypatch.setattr("celo2.commands.data.fetch", fake)
    assert cli.main(["data", "fetch"]) == 2
    assert capsys.readouterr().err == "celo2: the hub does not answer: is this machine online?\n"


@pytest.mark.parametrize(
    ("command", "own", "other"),
    [
        ("fetch", "--names", "--tokenizer"),
        ("tokens", "--from", "--names"),
        ("check", "STR", "--force"),
    ],
)
def test_each_has_its_own_options(command, own, other, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["data", command, "--help"])
    out = capsys.readouterr().out.replace("--help", "")
    assert stopped.value.code == 0 and own in out and other not in out
