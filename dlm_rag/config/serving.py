"""Settings of `dlm-rag serve`: who may ask, and how much."""

from dataclasses import dataclass

from dlm_rag.config.checked import CheckedSettings, setting


@dataclass
class ServingConfig(CheckedSettings):
    """Limits of the server; what is beyond one is refused, and nothing else suffers."""

    api_keys_file: str | None = setting(None)
    """file of API keys, one per line; every request then needs one of them; unset: no key is needed"""
    max_queue_per_key: int = setting(64, low=1, high=2**20)
    """maximum number of waiting questions per API key; further ones get status 429"""
    timeout: float = setting(300.0, low=0.01, high=2**20)
    """time limit of a question in seconds, waiting included"""
    max_tokens: int | None = setting(None, low=1, high=2**20)
    """maximum response length that a request may ask for; unset: decode.max_new_tokens"""
    max_connections: int = setting(512, low=1, high=2**16)
    """maximum number of open connections; further ones get status 503"""
