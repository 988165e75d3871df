"""The federated optimiser of an experiment: a name, a table, an object, or the selector's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedcor.describe import describe
from fedcor.errors import ConfigError
from fedcor.experiments.check import errors_under
from fedcor.optimisers import OPTIMISERS, ShortForm, as_optimiser, build_optimiser
from fedcor.types import Optimiser

__all__ = ["as_optimiser_setting", "describe_optimiser", "make_optimiser"]

# Records have said of these, since the first, only what was set; so they go on.
_AS_SET = ("fedavg", "fedprox")


def as_optimiser_setting(given: Any) -> Any:
    """A table, which need not have a `name`; the object; or None."""
    if isinstance(given, str):
        return {"name": given}
    if given is not None and not isinstance(given, Mapping):
        try:
            as_optimiser(given)
        except ConfigError as error:
            about = error.renamed if error.key == "name" else error.under
            raise about("optimiser") from None
    return given


def make_optimiser(setting: Any, default: Callable[[], str]) -> Optimiser:
    """The optimiser of a setting.

    Args:
        setting: What `as_optimiser_setting` returned.
        default: Gives the name of the optimiser where the setting has none.

    Raises:
        ConfigError: There is no such optimiser, or an option is wrong.
    """
    if setting is not None and not isinstance(setting, Mapping):
        return as_optimiser(setting)
    name, options = _named(setting, default)
    with errors_under("optimiser"):
        return build_optimiser(name, options)


def describe_optimiser(setting: Any, default: Callable[[], str]) -> dict[str, Any]:
    """As the table `[optimiser]` of a file, as far as a file can say it.

    It has all options, so that a record tells what ran when a default is another one day. The
    exceptions are as old as the records: of `FedAvg` and `FedProx`, and of the short form by name,
    it has what was set.
    """
    optimiser = make_optimiser(setting, default)
    if setting is None or isinstance(setting, Mapping):
        name, options = _named(setting, default)
        if name in _AS_SET or isinstance(optimiser, ShortForm):
            return {"name": name, **options}
    if isinstance(optimiser, ShortForm):
        return _as_table(optimiser.short_form)
    name, table = OPTIMISERS.name_of(optimiser), {**_as_table(optimiser)}
    if name not in _AS_SET:
        return {**table, "name": name}
    usual = describe(OPTIMISERS.built_in[name]())
    return {"name": name, **{k: v for k, v in table.items() if k != "name" and v != usual[k]}}


def _named(setting: Any, default: Callable[[], str]) -> tuple[str, dict[str, Any]]:
    """The name and the options of a table."""
    options = dict(setting or {})
    return options.pop("name") if "name" in options else default(), options


def _as_table(given: Any) -> dict[str, Any]:
    described = describe(given)
    return {"name" if key == "class" else key: value for key, value in described.items()}
