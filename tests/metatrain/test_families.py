import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from celo2.jax.optimizer import leaf_paths
from celo2.metatrain import MetaConfig, families
from celo2.metatrain.config import FamilyConfig, from_fields, of_family, read_toml
from celo2.metatrain.families import FAMILIES, count_problems, load_families
from celo2.routing import route
from celo2.rule import CELO2
from celo2.tasks.networks import LANGUAGE_MODELS
from rules import jit

ALL = from_fields({"families": list(FAMILIES), "datasets": ["digits"], "problems": 3})


@pytest.fixture(scope="module")
def loaded():
    return load_families(ALL)


def test_paper_s_images_are_the_default():
    source = load_families(MetaConfig(datasets=("digits",)))
    (family,) = source.families
    assert family.names == ("digits",) and family.problems == 8
    sizes = [leaf.size for leaf in jax.tree.leaves(family.init(jax.random.key(0)))]
    assert sum(sizes) == 2410


def test_families_come_in_order_with_names_of_their_own(loaded):
    first = [family.names[0] for family in loaded.families]
    assert first == [
        f"{name}/{'digits' if known.images else 'python-docs'}" for name, known in FAMILIES.items()
    ]
    assert set(loaded.checksums) == {"digits", "python-docs"}
    assert count_problems(ALL) == [family.problems for family in loaded.families]


@pytest.mark.parametrize("name", FAMILIES)
def test_family_starts_near_the_loss_of_guessing(loaded, name):
    family = loaded.families[list(FAMILIES).index(name)]
    key = jax.random.key(0)
    batch = family.sample(family.data, key, jnp.array(0))
    loss, grads = jit(jax.value_and_grad(family.loss))(family.init(key), batch)
    assert 0.7 * math.log(family.classes) < loss < 1.4 * math.log(family.classes)
    assert loss < family.highest_loss
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "image-mlp"])
def test_rule_trains_hidden_matrices_of_every_family(loaded, name):
    family = loaded.families[list(FAMILIES).index(name)]
    params = jax.eval_shape(family.init, jax.random.key(0))
    routes = [
        route(path, leaf.shape, CELO2, family.overrides)
        for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True)
    ]
    updaters = [each.updater for each in routes]
    assert updaters.count("rule") >= 1 and updaters.count("adam") >= 1


def test_a_family_s_own_settings_come_before_its_table_s_and_the_run_s():
    table = FAMILIES["transformer"].defaults
    config = from_fields({"families": ["transformer"], "batch": 7, "unroll": [50, 60]})
    own = load_families(config).families[0].config
    assert (own.batch, own.inner_rates) == (table["batch"], table["inner_rates"])
    assert own.unroll == (50, 60)
    config = from_fields({"families": [{"name": "transformer", "batch": 3, "weight": 2.0}]})
    family = load_families(config).families[0]
    assert family.config.batch == 3 and family.weight == 2.0


def test_config_file_has_tables_of_families_and_a_mix(tmp_path):
    path = tmp_path / "mixed.toml"
    path.write_text(
        '[start_mix]\nmomentum = [0.5, 0.5]\n[[families]]\nname = "vit"\nproblems = 2\n'
        '[[families]]\nname = "transformer"\n'
    )
    config = read_toml(path)
    assert config.families == (FamilyConfig("vit", problems=2), FamilyConfig("transformer"))
    assert config.start_mix == (("momentum", (0.5, 0.5)),)
    assert of_family(config, config.families[0]).problems == 2


def test_task_of_one_s_own_may_be_a_family(monkeypatch):
    task = families.language_model(families.load_text(), LANGUAGE_MODELS["tiny"], 2)
    monkeypatch.setattr(families, "import_function", lambda *_: lambda: task)
    config = from_fields({"families": ["mine:make", "transformer"]})
    source = load_families(config)
    assert source.families[0].names == ("mine:make/mine:make",)
    assert len(source.checksums) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"families": ["rnn"]}, "'rnn' is not a family; there are image-mlp, "),
        ({"families": ["vit", "vit"]}, "a family may be named once"),
        ({"families": [{"problems": 2}]}, "neither a name nor a table with a name"),
        ({"families": [{"name": "vit", "width": 2}]}, "families.vit.width is not a field"),
        ({"families": [{"name": "vit", "weight": 0.0}]}, "weight=0.0 of vit must be a positive"),
        ({"families": ["vit"], "task": "mine:make"}, "name the task among the families"),
        ({"families": ["transformer"], "datasets": ["digits"]}, "no family trains on images"),
        ({"start_mix": {"speed": [1.0]}}, "'speed' is not a feature"),
        ({"start_mix": {"rms": [1.0]}, "start": "momentum"}, "start_mix were given: give one"),
        ({"inner_weight_decays": []}, "must hold numbers of at least 0"),
        ({"averaging": 1.0}, r"averaging=1.0 must be in \[0, 1\)"),
        ({"clip": 0.0}, "clip=0.0 must be a positive number"),
        ({"families": ["pixel-mlp"], "datasets": ["svhn"]}, "no grey images"),
        ({"estimator": "backprop", "late_weight": 2.0}, "takes neither balance nor late_weight"),
    ],
)
def test_mistakes_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        load_families(from_fields(fields))
