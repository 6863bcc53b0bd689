import jax
import jax.numpy as jnp
import numpy as np
import pytest

from celo2.jax import grouping


def double_and_sum(static, job):
    return static * job["x"], jnp.sum(job["y"])


def jobs():
    shapes = [(2, 3), (4,), (2, 3), (2, 3), (4,), (5,)]
    arrays = [
        jnp.arange(np.prod(s), dtype=jnp.float32).reshape(s) + i for i, s in enumerate(shapes)
    ]
    return [(2.0, {"x": x, "y": x + 1}) for x in arrays]


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_loops_give_what_separate_calls_give(monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    found = grouping.for_each_shape(double_and_sum, jobs(), ["role"] * 6)
    for (static, job), result in zip(jobs(), found, strict=True):
        jax.tree.map(np.testing.assert_array_equal, result, double_and_sum(static, job))


def test_one_body_is_traced_for_each_shape():
    calls = []

    def counted(static, job):
        calls.append(job["x"].shape)
        return double_and_sum(static, job)

    jax.make_jaxpr(lambda: grouping.for_each_shape(counted, jobs(), ["role"] * 6))()
    assert sorted(set(calls)) == sorted(calls)


def test_jobs_with_other_constants_are_kept_apart():
    first, second = jobs()[0], (3.0, jobs()[0][1])
    found = grouping.for_each_shape(double_and_sum, [first, second], ["role", "role"])
    np.testing.assert_array_equal(found[1][0], 3.0 * first[1]["x"])


def test_roles_forget_numbers():
    tree = {"block_0": {"query": 1.0}, "block_12": {"query": 1.0}}
    assert len(set(grouping.roles_of(tree))) == 1


def test_no_kernel_is_compiled_for_one_tensor_only():
    def run(jobs):
        return grouping.for_each_shape(double_and_sum, jobs, ["role"] * len(jobs))

    same = [{"x": jnp.ones((8, 16)) * i, "y": jnp.ones((8, 16))} for i in range(5)]
    compiled = jax.jit(lambda jobs: run([(2.0, job) for job in jobs])).lower(same).compile()
    # A slice at a constant place would make the kernels of two tensors differ.
    assert " dynamic-slice(" in compiled.as_text()
    assert " slice(" not in compiled.as_text()
