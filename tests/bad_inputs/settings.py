"""Settings, flags and config files."""

from bad_inputs import ASK, Case

CASES = [
    Case("an unknown key", f"{ASK} decode.comit_threshold=0.9", "nearest: 'decode.commit_threshold'"),
    Case("a YAML file that is none", f"{ASK} --config c.yaml", "c.yaml", {"c.yaml": "decode: [1"}),
]
