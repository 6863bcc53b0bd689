import json
import subprocess
import sys

import numpy as np
import pytest

import celo2
from celo2 import cli, rulefile
from celo2.rule import CELO2, CELO2_BASE, FEATURES, Rule, initial_weights
from lstm_rules import SMALL, packed, published_tree, random_rule
from rule_files import published

pytest.importorskip("tyro", reason="tyro is not installed")
RULE = Rule(CELO2, initial_weights(CELO2, np.random.default_rng(4)), {"by": "hand\x1b[2J"})


@pytest.fixture
def rule_file(tmp_path):
    celo2.save(RULE, tmp_path / "rule.safetensors")
    return str(tmp_path / "rule.safetensors")


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "theta.state").write_bytes(published())
    return str(tmp_path / "theta.state")


def test_convert_writes_a_rule_with_the_preset(checkpoint, tmp_path, capsys):
    out = str(tmp_path / "out.safetensors")
    assert cli.main(["convert", checkpoint, out]) == 0
    assert celo2.load(out).config == CELO2
    assert "347 parameters" in capsys.readouterr().out
    assert cli.main(["convert", checkpoint, out, "--preset", "celo2-base"]) == 0
    assert celo2.load(out).config == CELO2_BASE


def test_convert_options_change_single_fields(checkpoint, tmp_path):
    out = str(tmp_path / "out.safetensors")
    options = "--form d_exp_m --norm raw --orthogonalize False --vectors rule --rms-decay 0.9"
    decays = "--momentum-decays 0.1 0.2 0.3 --factored-decays 0.4 0.5 0.6"
    assert cli.main(["convert", checkpoint, out, *options.split(), *decays.split()]) == 0
    config = celo2.load(out).config
    assert (config.form, config.norm, config.rms_decay) == ("d_exp_m", "raw", 0.9)
    assert (config.orthogonalize, config.vectors) == (False, "rule")
    assert config.momentum_decays == (0.1, 0.2, 0.3)
    assert config.factored_decays == (0.4, 0.5, 0.6)


def test_checkpoint_of_celo_is_converted_and_shown(tmp_path, capsys):
    file, out = tmp_path / "theta.state", str(tmp_path / "out.safetensors")
    file.write_bytes(packed(published_tree(random_rule(SMALL["celo"]))))
    assert cli.main(["convert", str(file), out]) == 0
    assert "parameters, for celo" in capsys.readouterr().out
    assert cli.main(["info", out, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["optimizer"] == facts["config"]["optimizer"] == "celo"
    assert list(facts["feature_norms"]) == [feature.name for feature in FEATURES]
    assert cli.main(["convert", str(file), out, "--norm", "raw"]) == 2
    assert "is a checkpoint of celo, which has no norm" in capsys.readouterr().err


def test_options_of_velo_are_not_celo2_s(checkpoint, tmp_path, capsys):
    out = str(tmp_path / "out.safetensors")
    assert cli.main(["convert", checkpoint, out, "--bank-scale", "1"]) == 2
    assert "is a checkpoint of celo2, which has no bank_scale" in capsys.readouterr().err


def test_info_as_json_has_every_fact(rule_file, capsys):
    assert cli.main(["info", rule_file, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["config"]["momentum_decays"] == [0.9, 0.99, 0.999]
    assert facts["parameters"] == 347
    assert facts["origin"] == RULE.origin
    assert facts["sha256"] == rulefile.digest(RULE)
    with open(rule_file, "rb") as file:
        assert facts["bytes"] == len(file.read())
    assert list(facts["feature_norms"]) == [feature.name for feature in FEATURES]
    momentum = np.linalg.norm(RULE.weights["w0"][3:6])
    assert facts["feature_norms"]["momentum"] == pytest.approx(momentum, abs=1e-4)
    total = sum(norm**2 for norm in facts["feature_norms"].values()) ** 0.5
    assert total == pytest.approx(np.linalg.norm(RULE.weights["w0"]), abs=1e-3)


def test_info_as_table_shows_the_facts_and_no_terminal_codes(rule_file, capsys):
    assert cli.main(["info", rule_file]) == 0
    out = capsys.readouterr().out
    for text in ("347", "orthogonalize", "factored_momentum", rulefile.digest(RULE), "hand"):
        assert text in out
    assert all(line.isprintable() for line in out.splitlines())


def test_push_sends_the_rule_and_a_card(rule_file, monkeypatch, capsys):
    sent = {}
    monkeypatch.setattr(
        rulefile,
        "push",
        lambda repo, files, private: sent.update(repo=repo, files=files, p=private),
    )
    assert cli.main(["push", rule_file, "ada/rules", "--private"]) == 0
    assert (sent["repo"], sent["p"]) == ("ada/rules", True)
    assert sent["files"]["rule.safetensors"] == rulefile.to_bytes(RULE)
    assert 'celo2.load("hf://ada/rules")' in sent["files"]["README.md"].decode()
    assert 'celo2.load("hf://ada/rules")' in capsys.readouterr().out
    assert cli.main(["push", rule_file, "ada/rules", "--no-card", "--file", "b.safetensors"]) == 0
    assert list(sent["files"]) == ["b.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "absent.safetensors"], "There is no file absent.safetensors"),
        (["info", "hf://nonsense"], "write hf://user/repo"),
        (["convert", "absent.state", "out.safetensors"], "There is no file absent.state"),
        (["push", "absent.safetensors", "ada/rules"], "There is no file"),
        (["frobnicate"], "'frobnicate' is not a command; there are "),
    ],
)
def test_user_errors_are_one_line_and_status_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CELO2_DEBUG", raising=False)
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("celo2: ") and message in captured.err
    assert captured.err.count("\n") == 1


def test_debug_shows_the_traceback(capsys, monkeypatch):
    monkeypatch.delenv("CELO2_DEBUG", raising=False)
    assert cli.main(["info", "absent", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("CELO2_DEBUG", "1")
    assert cli.main(["info", "absent"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_mistakes_in_our_code_are_not_hidden(monkeypatch):
    def broken(rule):
        raise KeyError("bug")

    monkeypatch.setattr(rulefile, "find_rule", broken)
    with pytest.raises(KeyError):
        cli.main(["info", "celo2"])


def test_wrong_options_exit_with_2(rule_file, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["info", rule_file, "--nonsense"])
    assert caught.value.code == 2


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)
    assert cli.main([]) == 2


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert f"celo2 {name}" in capsys.readouterr().out


def test_one_line_adds_a_command_and_its_status_is_the_exit_status(monkeypatch):
    def count(number: int) -> int:
        return number

    monkeypatch.setitem(cli.COMMANDS, "count", cli.Command("count", lambda: count))
    assert cli.main(["count", "3"]) == 3


def test_missing_tyro_is_named(rule_file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["info", rule_file]) == 2
    assert 'pip install "celo2[cli]"' in capsys.readouterr().err


def test_version_runs_as_a_process_and_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from celo2.cli import main\n"
        "main(['--version'])\n"
        "main(['--help'])\n"
        "print(sorted({'jax', 'torch', 'huggingface_hub', 'tyro'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[0] == f"celo2 {celo2.__version__}"
    assert run.stdout.splitlines()[-1] == "[]"


def test_process_status_and_a_reader_that_leaves(rule_file):
    celo2_command = [sys.executable, "-m", "celo2.cli"]
    run = subprocess.run([*celo2_command, "info", "absent"], capture_output=True, text=True)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    shell = f"{' '.join(celo2_command)} info {rule_file} | true"
    run = subprocess.run(shell, shell=True, capture_output=True, text=True)
    assert run.stderr == ""


def test_warnings_are_one_line(capsys, monkeypatch, recwarn):
    rule = Rule(CELO2, RULE.weights, {"trained": "no"})
    monkeypatch.setattr(rulefile, "_shipped", lambda name: rule)
    assert cli.main(["info", "celo2"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("celo2: warning: The shipped rule 'celo2' is an untrained")
    assert err.count("\n") == 1
