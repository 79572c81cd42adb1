"""DiffusionGemma, which denoises from uniform noise: config, model and decoding. It is not trained here.

Three seams bring it in, none of which names it: `Family.load`, `DenoiserConfig.adapter` and
`HostedDenoiser.make_runner`.
"""
