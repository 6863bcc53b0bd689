"""Tasks in bfloat16: gathered tables are summed up in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from celo2.evaluate.program import in_precision
from celo2.tasks import Corpus, LMConfig, Task, language_model

BATCH, LENGTH = 32, 64


def table_gradient(task: Task) -> np.ndarray:
    params = task.init(jax.random.key(0))
    batch = task.sample(task.data, jax.random.key(1), "train")
    grads, _ = jax.jit(jax.grad(task.loss, has_aux=True))(params, batch)
    return np.asarray(grads["embed"]["table"])


def test_gradient_of_a_token_seen_thousands_of_times_is_that_of_float32():
    tokens = np.zeros(10_000, np.uint8)
    tokens[::50] = 1
    # No blocks: embedding and head alone have the gather, and compile quickly.
    task = language_model(Corpus("", "", tokens, tokens, 2), LMConfig(32, 0, 32, LENGTH), BATCH)
    seen = np.asarray(task.sample(task.data, jax.random.key(1), "train"))
    assert np.sum(seen[:, :-1] == 0) > 1900
    whole, half = table_gradient(task), table_gradient(in_precision(task, jnp.bfloat16))
    assert half.dtype == np.float32
    assert np.linalg.norm(half[0] - whole[0]) < 0.02 * np.linalg.norm(whole[0])


def gather_task(**options) -> Task:
    """The mean of a table's rows and a kernel's product with it, both seen by their dtypes."""

    def loss(params, rows):
        dtypes.update({name: p.dtype.name for name, p in params.items()})
        x = params["table"][rows].astype(params["kernel"].dtype)
        return jnp.mean(x @ params["kernel"]), {}

    dtypes: dict[str, str] = {}
    params = {"table": jnp.ones((3, 2)), "kernel": jnp.ones((2, 2))}
    data = {"rows": jnp.arange(3), "dtypes": dtypes}
    return Task(lambda key: params, lambda data, key, split: data, loss, data, **options)


@pytest.mark.parametrize(("gathered", "dtype"), [((), "bfloat16"), (("table",), "float32")])
def test_tasks_say_which_parameters_stay_whole(gathered, dtype):
    task = gather_task(gathered=gathered)
    value, _ = in_precision(task, jnp.bfloat16).loss(task.init(None), task.data["rows"])
    assert task.data["dtypes"] == {"table": dtype, "kernel": "bfloat16"}
    assert (value.dtype.name, float(value)) == ("float32", 2.0)


def test_gathered_parameter_that_does_not_exist_is_named():
    task = gather_task(gathered=("tabel",))
    with pytest.raises(ValueError, match="no parameter 'tabel'; there are kernel, table"):
        in_precision(task, jnp.bfloat16).loss(task.init(None), task.data["rows"])
