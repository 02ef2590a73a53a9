"""Usage reporting of the libraries is off unless the user has said otherwise in the environment."""

from __future__ import annotations

from collections.abc import MutableMapping

REPORTING_OFF = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def usage_reporting_off(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Sets what is not set; returns what actors must see as well."""
    for name, value in REPORTING_OFF.items():
        environment.setdefault(name, value)
    return {name: environment[name] for name in REPORTING_OFF}
