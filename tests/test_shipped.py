import subprocess
import sys

import pytest

import celo2
from celo2 import rulefile
from celo2.rule import CELO2, CELO2_BASE
from rule_files import make_rule, same


@pytest.mark.parametrize(
    ("name", "config", "least"), [("celo2", CELO2, 5_000), ("celo2-base", CELO2_BASE, 10_000)]
)
def test_shipped_rule_has_its_config_and_was_meta_trained(name, config, least):
    rule = celo2.pretrained(name)  # warnings are errors here: it has none to give
    assert rule.config == config
    assert rule.origin["made_by"] == "celo2 meta-train"
    origin = rule.origin
    assert origin.get("total_iterations", origin["iterations"]) >= least
    assert set(rule.origin["data"]) == {"mnist", "fashion_mnist", "cifar10", "svhn"}


def test_untrained_placeholder_warns(monkeypatch):
    rule = make_rule(origin={"trained": "no"})
    monkeypatch.setattr(rulefile, "_shipped", lambda name: rule)
    with pytest.warns(UserWarning, match="'celo2' is an untrained placeholder"):
        celo2.pretrained("celo2")


def test_trained_rule_does_not_warn(monkeypatch):
    monkeypatch.setattr(rulefile, "_shipped", lambda name: make_rule())
    assert same(celo2.pretrained("celo2"), make_rule())


def test_unknown_name_is_answered_with_the_names():
    with pytest.raises(ValueError, match="'velo' is not a shipped rule; there are celo2, celo2-b"):
        celo2.pretrained("velo")


def test_as_rule_takes_rules_names_and_paths(tmp_path, monkeypatch):
    rule = make_rule()
    celo2.save(rule, tmp_path / "rule.safetensors")
    monkeypatch.setattr(rulefile, "_shipped", lambda name: make_rule(origin={"name": name}))
    assert rulefile.as_rule(rule) is rule
    assert rulefile.as_rule("celo2-base").origin == {"name": "celo2-base"}
    assert same(rulefile.as_rule(tmp_path / "rule.safetensors"), rule)
    assert same(rulefile.as_rule(str(tmp_path / "rule.safetensors")), rule)
    with pytest.raises(FileNotFoundError, match="shipped rules are celo2, celo2-base"):
        rulefile.as_rule("velo")
    with pytest.raises(TypeError, match="rule=3 is a int; give a Rule, a shipped name"):
        rulefile.as_rule(3)


def test_import_is_light():
    code = (
        "import sys, celo2\n"
        "heavy = {'jax', 'torch', 'huggingface_hub', 'tyro', 'msgpack', 'matplotlib'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
        "print(all(hasattr(celo2, name) for name in celo2.__all__), celo2.__version__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[0] == "[]"
    assert run.stdout.splitlines()[1].startswith("True ")
