import json
import socket
import sys
import time
import types

import numpy as np
import pytest

from celo2.tasks import download, images
from celo2.tasks.download import area_average, area_weights, shrink
from conftest import data_folder

SIZES = {"train": 25, "test": 10}


class StandInDataset:
    """As much of a `datasets.Dataset` as is used: batches of columns."""

    def __init__(self, column, shape, count, seed):
        rng = np.random.RandomState(seed)
        self.column = column
        self.images = rng.randint(0, 256, (count, *shape)).astype(np.uint8)
        self.labels = rng.randint(0, 10, count).tolist()

    def iter(self, batch_size):
        for i in range(0, len(self.labels), batch_size):
            part = slice(i, i + batch_size)
            yield {self.column: list(self.images[part]), "label": self.labels[part]}


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
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(download, "_answers", lambda url, timeout: True)
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
        np.testing.assert_array_equal(small.train_x, shrink(source.images))
        assert digests[f"{name}_8x8.npz"] == small.checksum()
        assert digests[f"{name}.npz"] == full.checksum()
    assert ("ufldl-stanford/svhn", "cropped_digits", "train") in hub.calls


def test_manifest_keeps_origin_shapes_and_digest(hub, tmp_path):
    download.fetch(tmp_path, ["mnist"])
    download.fetch(tmp_path, ["svhn"])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest.keys() == {"mnist_8x8.npz", "svhn_8x8.npz"}
    entry = manifest["mnist_8x8.npz"]
    assert entry["repository"] == "ylecun/mnist"
    assert entry["shapes"]["train_x"] == [25, 8, 8]
    assert entry["sha256"] == images.load_images("mnist", tmp_path).checksum()


def test_progress_rises_to_the_total(hub, tmp_path):
    rows = []
    download.fetch(tmp_path, ["mnist"], report=rows.append)
    assert [row.done for row in rows] == sorted(row.done for row in rows)
    assert rows[0].state == "converting" and rows[0].done == 8
    assert rows[-1] == download.FetchProgress("mnist", "written", 35, 35)


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
    with pytest.raises(ImportError, match=r'needs datasets: pip install "celo2\[data\]"'):
        download.fetch(tmp_path, ["mnist"])


def test_silent_endpoint_is_given_up_quickly(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with socket.socket() as server:  # accepts connections and never answers
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(download.FetchError, match="does not answer.*HF_HUB_OFFLINE=1.*digits"):
            with download.hub_access("mnist", download.OFFLINE_IMAGES, timeout=0.3):
                raise AssertionError("was entered")
        assert time.monotonic() - start < 3


def test_offline_mode_asks_nobody(hub, tmp_path, monkeypatch):
    def no_network(url, timeout):
        raise AssertionError("asked the network")

    monkeypatch.setattr(download, "_answers", no_network)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    download.fetch(tmp_path, ["mnist"])
    hub.load_dataset = None  # calling it fails, as a cache without the dataset does
    with pytest.raises(download.FetchError, match="HF_HUB_OFFLINE is set"):
        download.fetch(tmp_path, ["svhn"])


def test_32_to_8_is_the_block_mean():
    images = np.random.RandomState(0).randint(0, 256, (5, 32, 32)).astype(np.uint8)
    blocks = images.reshape(5, 8, 4, 8, 4).astype(float).mean((2, 4))
    np.testing.assert_array_equal(area_average(images), blocks)


def test_28_to_8_counts_cut_pixels_by_half():
    np.testing.assert_allclose(area_weights(28, 8)[0, :5] * 3.5, [1, 1, 1, 0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(area_weights(28, 8)[1, 2:8] * 3.5, [0, 0.5, 1, 1, 1, 0], rtol=1e-6)


@pytest.mark.parametrize("side", [8, 9, 28, 32])
def test_a_plain_image_keeps_its_level(side):
    np.testing.assert_array_equal(shrink(np.full((2, side, side, 3), 77, np.uint8)), 77)


def test_a_half_is_rounded_up():
    halves = np.zeros((1, 16, 16), np.uint8)
    halves[:, ::2] = 1  # the mean of every 2×2 block is 0.5
    np.testing.assert_array_equal(shrink(halves), 1)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_shrinking_reproduces_the_8x8_files(name):
    folder = data_folder()
    full, small = (
        np.load(folder / f"{name}{suffix}.npz", allow_pickle=False) for suffix in ("", "_8x8")
    )
    expected = small["test_x"]
    if "test_index" in full.files:  # a subset of the whole split
        expected = expected[full["test_index"]]
    np.testing.assert_array_equal(shrink(full["test_x"]), expected)
