from itertools import islice

import jax
import numpy as np
import pytest

from celo2.tasks import TASKS, Part, ViTConfig
from celo2.tasks.imagenet import Record, decode_image, image_stream, load_image_files, streamed_vit
from celo2.tasks.images import Crop, to_signed

pytest.importorskip("grain")
Image = pytest.importorskip("PIL.Image")

SIDE, BATCH = 8, 4
COLOURS = {"cat": (200, 10, 10), "dog": (10, 200, 10), "owl": (10, 10, 200)}
TINY = ViTConfig(SIDE, 3, 4, width=16, layers=1, head_width=8, classes=len(COLOURS))


def save(path, colour=(90, 90, 90), size=(16, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def data(tmp_path):
    """Ten images, each grey value its own number, so that every one can be told; two classes
    have three in train, one has four, and each one in val."""
    number = 0
    for name in COLOURS:
        for i in range(4 if name == "owl" else 3):
            save(tmp_path / "imagenet" / "train" / name / f"{i}.png", (20 * number, 0, 50), (8, 8))
            number += 1
        save(tmp_path / "imagenet" / "val" / name / "0.png", COLOURS[name])
    (tmp_path / "imagenet" / "train" / "owl" / "notes.txt").write_text("no image")
    return tmp_path


@pytest.fixture
def stream(data):
    return image_stream(load_image_files(data), BATCH, SIDE)


def take(stream, count, split="train", seed=0, first=0, part=None):
    return list(islice(stream.batches(split, seed, first, part or Part()), count))


def assert_equal(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def numbers(batches):
    """Which images the batches are of; their red value says."""
    return [round(int(x[..., 0].max()) / 20) for xs, _ in batches for x in xs]


def test_batches_have_the_shapes_of_the_example(stream):
    (batch,) = take(stream, 1)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), stream.example) == jax.tree.map(
        lambda a: (a.shape, a.dtype), batch
    )


def test_same_arguments_give_the_same_batches_and_other_seeds_others(stream):
    assert_equal(take(stream, 3), take(stream, 3))
    ours, theirs = take(stream, 3, seed=0), take(stream, 3, seed=1)
    assert numbers(ours) != numbers(theirs)


def test_stream_resumes_at_the_exact_batch_across_epochs(stream):
    assert_equal(take(stream, 7)[4:], take(stream, 3, first=4))


def test_every_image_comes_once_an_epoch_in_a_new_order_with_its_label(stream):
    seen = numbers(take(stream, 5))
    epochs = seen[:10], seen[10:20]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])
    labels = [int(y) for _, ys in take(stream, 5) for y in ys]
    assert labels == [min(number // 3, 2) for number in seen]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_parts_are_the_rows_of_the_whole_batch(stream, split):
    whole = take(stream, 3, split, first=1)
    for index in range(2):
        part = take(stream, 3, split, first=1, part=Part(index, 2))
        assert_equal(part, [jax.tree.map(lambda a, i=index: a[i::2], batch) for batch in whole])


def test_batch_that_cannot_be_divided_is_refused(stream):
    with pytest.raises(ValueError, match="A batch of 4 rows does not divide into 3 equal parts"):
        take(stream, 1, part=Part(0, 3))


def test_validation_is_whole_mixed_and_always_the_same(stream):
    ours, theirs = take(stream, 3, "valid", seed=0), take(stream, 3, "valid", seed=5)
    assert_equal(ours, theirs)
    labels = [int(y) for _, ys in ours for y in ys]
    assert labels[:3] == labels[3:6] and sorted(labels[:3]) == [0, 1, 2]
    for x, y in zip(ours[0][0], ours[0][1], strict=True):
        # Wider than high: the image fills the middle, black margins above and below.
        np.testing.assert_array_equal(x[SIDE // 2, SIDE // 2], list(COLOURS.values())[y])
        np.testing.assert_array_equal(x[[0, -1]], 0)


def test_crop_shows_its_part_and_the_flip_mirrors_it(tmp_path):
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[:20, 20:] = (255, 0, 0)  # the upper right quarter
    pixels[:20, :20] = (0, 255, 0)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    record = Record("a", (tmp_path / "a.png").read_bytes(), 0)
    quarter = Crop(0.5, 0.0, 0.5, 0.5, False)
    # Smoothing reaches a little across the crop's edges.
    np.testing.assert_array_equal(decode_image(record, quarter, SIDE)[:-1, 1:, 0], 255)
    top = Crop(0.0, 0.0, 1.0, 0.5, False)
    whole = decode_image(record, top, SIDE)
    mirrored = decode_image(record, top._replace(flip=True), SIDE)
    assert whole[0, 0, 1] == 255 and mirrored[0, 0, 0] == 255
    np.testing.assert_array_equal(whole[:, ::-1], mirrored)


@pytest.mark.parametrize("content", [b"", b"no image at all", "cut"])
def test_broken_image_is_named(data, content):
    path = data / "imagenet" / "val" / "dog" / "0.png"
    if content == "cut":
        noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8)
        Image.fromarray(noise).save(path)
        content = path.read_bytes()[:-100]
    path.write_bytes(content)
    stream = image_stream(load_image_files(data), BATCH, SIDE)
    with pytest.raises(ValueError, match=r"val.dog.0\.png is not a readable image"):
        take(stream, 1, "valid")


def test_checksum_sees_a_name_and_a_size(data):
    before = load_image_files(data).checksum
    assert load_image_files(data).checksum == before
    first = data / "imagenet" / "train" / "cat" / "0.png"
    first.rename(first.with_name("9.png"))
    renamed = load_image_files(data).checksum
    (data / "imagenet" / "train" / "cat" / "9.png").write_bytes(b"another size")
    assert len({before, renamed, load_image_files(data).checksum}) == 3


def test_absent_images_error_says_how_to_get_them(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        TASKS["vit-b16-imagenet"].make(data=tmp_path)
    for part in (str(tmp_path / "imagenet"), "train/CLASS", "ILSVRC/imagenet-1k", "save_to_disk"):
        assert part in str(error.value)


def test_unsorted_or_unequal_folders_are_refused(data):
    (data / "imagenet" / "val" / "yak").mkdir()
    with pytest.raises(ValueError, match="3 class folders .* 4; in one only: yak"):
        load_image_files(data)
    (data / "imagenet" / "train" / "yak").mkdir()
    with pytest.raises(ValueError, match="yak has no image files"):
        load_image_files(data)
    flat = data / "flat"
    for half in ("train", "val"):
        save(flat / "imagenet" / half / "0.png")
    with pytest.raises(ValueError, match="train has no class folders"):
        load_image_files(flat)


def test_saved_dataset_gives_the_same_batches_as_a_folder(data, stream):
    datasets = pytest.importorskip("datasets")
    found = load_image_files(data)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(COLOURS))}
    )

    def rows(records):
        for record in (records[i] for i in range(len(records))):
            yield {"image": {"bytes": record.content, "path": None}, "label": record.label}

    splits = {
        name: datasets.Dataset.from_list(list(rows(records)), features)
        for name, records in (("train", found.train), ("validation", found.valid))
    }
    datasets.DatasetDict(splits).save_to_disk(str(data / "saved" / "imagenet"))
    saved = load_image_files(data / "saved")
    assert saved.classes == found.classes and saved.checksum != found.checksum
    theirs = image_stream(saved, BATCH, SIDE)
    for split in ("train", "valid"):
        assert_equal(take(stream, 3, split), take(theirs, 3, split))


def test_pixels_reach_the_model_between_minus_one_and_one(stream):
    signed = to_signed(np.array([[0, 255]], np.uint8))
    np.testing.assert_allclose(signed, [[-1, 1]], atol=1e-6)
    task = streamed_vit(stream, TINY)
    (batch,) = take(stream, 1)
    assert task.sample(batch, jax.random.key(0), "train") is batch
    loss, metrics = jax.jit(task.loss)(task.init(jax.random.key(0)), batch)
    assert np.isfinite(loss) and set(metrics) == {"loss", "accuracy"}


def test_model_s_arithmetic_follows_its_parameters(stream):
    task = streamed_vit(stream, TINY)
    params = jax.eval_shape(task.init, jax.random.key(0))
    half = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jax.numpy.bfloat16), params)
    text = str(jax.make_jaxpr(task.loss)(half, stream.example))
    product = next(line for line in text.splitlines() if "dot_general" in line)
    assert "bf16" in product.split("=")[0]  # of the images and the first kernel


def test_blank_stream_has_shapes_and_no_batches():
    task = TASKS["vit-b16-imagenet"].blank(batch=2)
    assert task.data.example[0].shape == (2, 256, 256, 3)
    with pytest.raises(ValueError, match="shapes only"):
        take(task.data, 1)
