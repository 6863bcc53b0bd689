"""Grey 8×8 versions of images, by exact area averaging."""

import numpy as np


def shrink(images: np.ndarray, size: int = 8) -> np.ndarray:
    """[N, size, size] uint8 from [N, H, W] or [N, H, W, 3] uint8, rounded half up."""
    average = area_average(grey(images), size)
    return np.floor(average + np.float32(0.5)).astype(np.uint8)


def grey(images: np.ndarray) -> np.ndarray:
    """[N, H, W] float32: the unweighted mean of the colour channels, where there are any."""
    images = images.astype(np.float32)
    return images if images.ndim == 3 else images.mean(axis=-1)


def area_average(images: np.ndarray, size: int = 8) -> np.ndarray:
    """[N, size, size] float32: each pixel the mean of the area of [N, H, W] that it covers."""
    return _average_axis(_average_axis(images, size, axis=1), size, axis=2)


def area_weights(source: int, target: int) -> np.ndarray:
    """[target, source]: each source pixel's part in each output pixel; rows sum to one."""
    edges = np.arange(target + 1) * source / target
    pixels = np.arange(source)
    covered = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (np.clip(covered, 0, None) * target / source).astype(np.float32)


def _average_axis(images: np.ndarray, size: int, axis: int) -> np.ndarray:
    # One pixel after the other, not a matrix product: a colour image has exact ties between two
    # grey levels, and the order of a library's sums must not decide them.
    weights = area_weights(images.shape[axis], size)
    source = np.moveaxis(images.astype(np.float32), axis, 0)
    average = np.zeros((size, *source.shape[1:]), np.float32)
    for target, pixel in zip(*np.nonzero(weights), strict=True):
        average[target] += weights[target, pixel] * source[pixel]
    return np.moveaxis(average, 0, axis)
