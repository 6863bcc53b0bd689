import pytest

from conftest import golden_folder, run_python


def test_rank_promotion_is_an_error():
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_strict_dtypes_makes_promotion_an_error(strict_dtypes):
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(ValueError, match="promotion"):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.bfloat16)


def test_run_python_has_the_devices_asked_for():
    pytest.importorskip("jax")
    assert run_python("import jax; print(jax.device_count())", devices=3).strip() == "3"


def test_run_python_reports_what_failed():
    with pytest.raises(AssertionError, match="the reason"):
        run_python("raise SystemExit('the reason')")


def test_wrong_golden_folder_is_an_error_not_a_skip(monkeypatch, tmp_path):
    monkeypatch.setenv("CELO2_GOLDEN", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="CELO2_GOLDEN"):
        golden_folder("celo2_pretrained")
