import hashlib
import json
import lzma
import socket
import sys
import time
import types

import numpy as np
import pytest

from celo2 import rulefile
from celo2.runs.checkpoint import digest_arrays
from celo2.tasks import datafiles, download, images, load_text
from celo2.tasks.download import shrink_images
from conftest import SAMPLES, data_folder
from hub import be_online, use_hub

huggingface_hub = pytest.importorskip("huggingface_hub")

SIZES = {"train": 25, "test": 10}


class StandInDataset:
    """As much of a `datasets.Dataset` as is used: all rows as arrays."""

    def __init__(self, column, shape, count, seed):
        rng = np.random.RandomState(seed)
        self.column = column
        self.images = rng.randint(0, 256, (count, *shape)).astype(np.uint8)
        self.labels = rng.randint(0, 10, count).tolist()

    def with_format(self, name):
        assert name == "numpy"
        return self

    def __getitem__(self, part):
        return {self.column: self.images[part], "label": np.asarray(self.labels)[part]}


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the `datasets` module that counts its calls, with small datasets."""
    module = types.ModuleType("datasets")
    module.calls = []

    def load_dataset(repository, config=None, *, split):
        module.calls.append((repository, config, split))
        name = next(n for n, s in download.SOURCES.items() if s.repository == repository)
        shape = images.FULL_SHAPES[name]
        column = download.SOURCES[name].column
        return StandInDataset(column, shape, SIZES[split], seed=len(split))

    module.load_dataset = load_dataset
    use_hub(monkeypatch, module)
    monkeypatch.setattr(download, "CHUNK", 8)
    for name, source in download.SOURCES.items():
        monkeypatch.setitem(download.SOURCES, name, source._replace(**SIZES))
    return module


def test_fetched_files_load_and_agree_with_their_source(hub, tmp_path):
    digests = download.fetch(tmp_path / "new" / "data", full=True)
    for name in images.IMAGE_SETS:
        small, full = (
            images.load_images(name, tmp_path / "new" / "data", s) for s in ("8x8", "full")
        )
        source = StandInDataset("", images.FULL_SHAPES[name], 25, seed=len("train"))
        np.testing.assert_array_equal(full.train_x, source.images)
        np.testing.assert_array_equal(full.train_y, source.labels)
        np.testing.assert_array_equal(small.train_x, shrink_images(source.images))
        assert digests[f"{name}_8x8.npz"] == small.checksum()
        assert digests[f"{name}.npz"] == full.checksum()
    assert ("ufldl-stanford/svhn", "cropped_digits", "train") in hub.calls


def test_images_of_the_library_are_decoded(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(repository, config=None, *, split):
        source = StandInDataset("img", (32, 32, 3), SIZES[split], seed=len(split))
        features = {"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}
        columns = {"img": list(source.images), "label": source.labels}
        return datasets.Dataset.from_dict(columns, datasets.Features(features))

    use_hub(monkeypatch, datasets)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = download.SOURCES["cifar10"]._replace(**SIZES)
    monkeypatch.setitem(download.SOURCES, "cifar10", source)
    download.fetch(tmp_path, ["cifar10"], full=True)
    for split, arrays in (("train", "train_x train_y"), ("test", "test_x test_y")):
        expected = StandInDataset("img", (32, 32, 3), SIZES[split], seed=len(split))
        x, y = (getattr(images.load_images("cifar10", tmp_path, "full"), a) for a in arrays.split())
        np.testing.assert_array_equal(x, expected.images)
        np.testing.assert_array_equal(y, expected.labels)


def test_manifest_keeps_origin_shapes_and_digest(hub, tmp_path):
    download.fetch(tmp_path, ["mnist"])
    download.fetch(tmp_path, ["svhn"])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest.keys() == {"mnist_8x8.npz", "svhn_8x8.npz"}
    entry = manifest["mnist_8x8.npz"]
    assert entry["repository"] == "ylecun/mnist"
    assert entry["shapes"]["train_x"] == [25, 8, 8]
    assert entry["sha256"] == images.load_images("mnist", tmp_path).checksum()


def test_report_names_each_download(hub, tmp_path):
    lines = []
    for _ in range(2):
        download.fetch(tmp_path, ["mnist", "svhn"], report=lines.append)
    assert lines == ["mnist: reading ylecun/mnist", "svhn: reading ufldl-stanford/svhn"]


def test_good_files_are_kept_and_damaged_ones_fetched_again(hub, tmp_path):
    first = download.fetch(tmp_path, ["mnist"])
    hub.calls.clear()
    assert download.fetch(tmp_path, ["mnist"]) == first
    assert hub.calls == []
    path = tmp_path / "mnist_8x8.npz"
    path.write_bytes(path.read_bytes()[:200])
    assert download.fetch(tmp_path, ["mnist"]) == first
    assert len(hub.calls) == 2
    assert len(download.fetch(tmp_path, ["mnist"], force=True)) == 1
    assert len(hub.calls) == 4


def test_file_that_differs_from_the_manifest_is_fetched_again(hub, tmp_path):
    first = download.fetch(tmp_path, ["mnist"])
    other = images.load_images("mnist", tmp_path)._asdict()
    other["test_x"][0, 0, 0] ^= 1
    np.savez(tmp_path / "mnist_8x8.npz", **{name: other[name] for name in images.ARRAYS})
    assert download.fetch(tmp_path, ["mnist"]) == first
    assert images.load_images("mnist", tmp_path).checksum() == first["mnist_8x8.npz"]


def test_failing_download_leaves_nothing(hub, tmp_path):
    load = hub.load_dataset

    def fail_on_test(repository, config=None, *, split):
        if split == "test":
            raise ConnectionError("the line is down")
        return load(repository, config, split=split)

    hub.load_dataset = fail_on_test
    with pytest.raises(download.FetchError, match="mnist .*test.* could not be read.*line is down"):
        download.fetch(tmp_path, ["mnist"])
    assert list(tmp_path.iterdir()) == []


def test_interrupted_write_leaves_nothing(hub, tmp_path, monkeypatch):
    def stop(file, **arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", stop)
    with pytest.raises(KeyboardInterrupt):
        download.fetch(tmp_path, ["mnist"])
    assert list(tmp_path.iterdir()) == []


def test_incomplete_dataset_is_refused(hub, tmp_path, monkeypatch):
    monkeypatch.setitem(download.SOURCES, "mnist", download.SOURCES["mnist"]._replace(train=60_000))
    with pytest.raises(download.FetchError, match="25 train images instead of 60000"):
        download.fetch(tmp_path, ["mnist"])
    assert list(tmp_path.iterdir()) == []


def test_default_folder_is_the_cache(hub, tmp_path, monkeypatch):
    monkeypatch.delenv("CELO2_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    download.fetch(names=["mnist"])
    assert images.load_images("mnist").source == str(tmp_path / "celo2" / "data" / "mnist_8x8.npz")


def test_unknown_name_is_refused_before_anything_else(tmp_path):
    with pytest.raises(ValueError, match="'digits' is not one of mnist"):
        download.fetch(tmp_path, ["digits"])


def test_missing_library_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'needs datasets .*: pip install "celo2\[data\]"'):
        download.fetch(tmp_path, ["mnist"])


def test_silent_endpoint_is_given_up_quickly(monkeypatch):
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(rulefile, "HUB_TIMEOUT", 0.3)
    be_online(monkeypatch)
    with socket.socket() as server:  # accepts connections and never answers
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        start = time.monotonic()
        with pytest.raises(datafiles.FetchError, match="Timeout.*HF_HUB_OFFLINE=1.*scikit-learn"):
            with datafiles.hub_access("mnist", download.OFFLINE_IMAGES):
                raise AssertionError("was entered")
        assert time.monotonic() - start < 3


def test_offline_mode_uses_the_cache_alone(hub, tmp_path, monkeypatch):
    def no_network():
        raise AssertionError("asked the network")

    monkeypatch.setattr("huggingface_hub.get_session", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    download.fetch(tmp_path, ["mnist"])
    hub.load_dataset = None  # calling it fails, as a cache without the dataset does
    with pytest.raises(download.FetchError, match="svhn .*HF_HUB_OFFLINE is set.*unset it"):
        download.fetch(tmp_path, ["svhn"])


def test_32_to_8_is_the_block_mean():
    images = np.random.RandomState(0).randint(0, 256, (5, 32, 32)).astype(np.uint8)
    blocks = images.reshape(5, 8, 4, 8, 4).astype(float).mean((2, 4))
    np.testing.assert_array_equal(shrink_images(images), np.floor(blocks + 0.5))


def test_28_to_8_counts_cut_pixels_by_half():
    images = np.zeros((7, 28, 28), np.uint8)
    images[np.arange(7), np.arange(7)] = 252  # one row each
    shares = np.array([2, 2, 2, 1, 0, 0, 0]) / 7  # of the first output row, 3.5 pixels high
    np.testing.assert_array_equal(shrink_images(images)[:, 0, 0], 252 * shares)
    np.testing.assert_array_equal(shrink_images(images)[:, 1, 0], 252 * shares[::-1])


@pytest.mark.parametrize("side", [8, 9, 28, 32])
def test_a_plain_image_keeps_its_level(side):
    np.testing.assert_array_equal(shrink_images(np.full((2, side, side, 3), 77, np.uint8)), 77)


def test_a_half_is_rounded_up():
    halves = np.zeros((1, 16, 16), np.uint8)
    halves[:, ::2] = 1  # the mean of every 2×2 block is 0.5
    np.testing.assert_array_equal(shrink_images(halves), 1)


def test_shrinking_reproduces_the_8x8_file_of_the_records():
    full, small = (images.load_images("fashion_mnist", SAMPLES, size) for size in ("full", "8x8"))
    np.testing.assert_array_equal(shrink_images(full.train_x), small.train_x)
    np.testing.assert_array_equal(shrink_images(full.test_x), small.test_x)


def test_ties_of_colour_images_are_decided_as_in_the_records():
    # 99 of these 4,096 pixels lie exactly between two grey levels; exact arithmetic decides 4 of
    # them otherwise. The files of the records were made with these sums.
    colour = np.random.RandomState(0).randint(0, 256, (64, 32, 32, 3)).astype(np.uint8)
    found = hashlib.sha256(np.ascontiguousarray(shrink_images(colour))).hexdigest()
    assert found == "8d0691f289f2a4e3ccb8ec10ca3ab2dd5e513e0aa2f60a35053f3f59d2562944"


ARTICLE_COUNT = 400


def article(number):
    return {
        "title": f"No. {number}",
        "text": f"{number} <b>is</b>  a number. " * (20 + number % 50),
    }


@pytest.fixture
def wikipedia(hub, monkeypatch):
    """A stand-in for the hub's Wikipedia, of which 20 kB are to be read."""

    def load_dataset(*place, **options):
        hub.calls.append((place, options))
        for number in range(ARTICLE_COUNT):
            hub.read = number
            yield article(number)

    hub.load_dataset = load_dataset
    monkeypatch.setattr(download, "WIKIPEDIA_BYTES", 20_000)
    monkeypatch.setattr(download, "SHORTEST", 600)
    return hub


def test_wikipedia_is_streamed_until_there_are_enough_bytes(wikipedia, tmp_path):
    digests = download.fetch(tmp_path, ["wikipedia"])
    corpus = load_text("wikipedia_en", tmp_path)
    assert wikipedia.calls == [
        (("wikimedia/wikipedia", "20231101.en"), {"split": "train", "streaming": True})
    ]
    assert 20_000 <= len(corpus.train) + len(corpus.valid) < 22_000
    assert wikipedia.read < ARTICLE_COUNT - 1
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for split, text in (("train", corpus.train), ("val", corpus.valid)):
        file = f"wikipedia_en_{split}.txt.xz"
        assert digests[file] == manifest[file]["sha256"] == hashlib.sha256(text).hexdigest()
        assert manifest[file]["repository"] == "wikimedia/wikipedia 20231101.en"


def test_wikipedia_s_articles_are_whole_long_drawn_and_in_one_split(wikipedia, tmp_path):
    download.fetch(tmp_path, ["wikipedia"])
    corpus = load_text("wikipedia_en", tmp_path)
    splits = [text.tobytes().decode().split("\n\n\n") for text in (corpus.train, corpus.valid)]
    numbers = [[int(part.split("\n")[0][4:]) for part in parts] for parts in splits]
    whole = numbers[0] + numbers[1]
    assert len(set(whole)) == len(whole) and whole != sorted(whole)
    assert 0.03 < len(whole) / wikipedia.read < 0.2
    assert 0.05 <= len(corpus.valid) / (len(corpus.train) + len(corpus.valid)) < 0.15
    for number, part in zip(whole, splits[0] + splits[1], strict=True):
        assert len(article(number)["text"]) >= 600
        expected = f"{number} is a number. " * (20 + number % 50)
        assert part.strip("\n") == f"No. {number}\n\n{expected.strip()}"


def test_same_dump_gives_the_same_text_and_a_good_one_is_kept(wikipedia, tmp_path):
    first = download.fetch(tmp_path, ["wikipedia"])
    assert download.fetch(tmp_path, ["wikipedia"]) == first and len(wikipedia.calls) == 1
    assert download.fetch(tmp_path, ["wikipedia"], force=True) == first
    assert len(wikipedia.calls) == 2
    path = tmp_path / "wikipedia_en_val.txt.xz"
    for content in (path.read_bytes()[:-30], lzma.compress(b"something else")):
        path.write_bytes(content)
        assert download.fetch(tmp_path, ["wikipedia"]) == first
    assert len(wikipedia.calls) == 4


def test_text_of_another_origin_is_kept(wikipedia, tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"wikipedia_en_{split}.txt.xz").write_bytes(lzma.compress(split.encode()))
    assert len(download.fetch(tmp_path, ["wikipedia"])) == 2
    assert wikipedia.calls == [] and load_text("wikipedia_en", tmp_path).valid.tobytes() == b"val"


def test_wikipedia_that_ends_early_leaves_nothing(wikipedia, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "WIKIPEDIA_BYTES", 10**9)
    with pytest.raises(download.FetchError, match=r"ended after [\d,]+ bytes instead of 1,000,000"):
        download.fetch(tmp_path, ["wikipedia"])
    assert list(tmp_path.iterdir()) == []


def test_wikipedia_offline_names_other_texts(wikipedia, tmp_path, monkeypatch):
    use_hub(monkeypatch, wikipedia, answers=False)
    with pytest.raises(download.FetchError, match="wikipedia .*no network.*--text.*python-doc"):
        download.fetch(tmp_path, ["wikipedia"])


def test_text_of_the_records_is_recognised(tmp_path, monkeypatch):
    for split in ("train", "val"):
        (tmp_path / f"wikipedia_en_{split}.txt.xz").write_bytes(lzma.compress(split.encode()))
    assert "is not the text of the records" in download.compare_with_records(tmp_path)
    digest = hashlib.sha256(b"trainval").hexdigest()
    monkeypatch.setattr(download, "RECORDS_TEXT", digest)
    assert download.compare_with_records(tmp_path).startswith("wikipedia_en is the text of the rec")


def test_real_text_is_that_of_the_records():
    folder = data_folder()
    if not (folder / "wikipedia_en_train.txt.xz").is_file():
        pytest.skip("the data folder has no wikipedia_en")
    assert "is the text of the records" in download.compare_with_records(folder)
    # The checksum in the records is over the arrays with their names.
    corpus = load_text("wikipedia_en", folder)
    found = digest_arrays({"train": corpus.train, "valid": corpus.valid})
    assert found == "366fa9fa8d7d06000581dbfd11ef0231f45cc3a6d1ca5a1b5283b819cecaf805"
