"""DiffusionGemma, which denoises from uniform noise; only `DenoiserConfig.adapter` brings it in."""
