"""What users import, and the promises made about it that need no training."""

from importlib.metadata import version

import pytest

import sdpo

PUBLIC = {
    *("SDPOConfig", "SDPOTrainer", "Score", "SDPOCallback", "NonFiniteLossError"),
    *("compare_teacher", "discover", "__version__"),
}


def test_public_names_are_exactly_these():
    assert set(sdpo.__all__) == PUBLIC
    assert set(dir(sdpo)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name):
    assert getattr(sdpo, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'SDPOTrianer'"):
        sdpo.SDPOTrianer  # noqa: B018, the access is the test


def test_version_is_that_of_the_distribution():
    assert sdpo.__version__ == version("sdpo")


def test_star_import_binds_the_public_names():
    names = {}
    exec("from sdpo import *", names)
    assert names.keys() >= PUBLIC
