"""DiffusionGemma, which denoises from uniform noise: config, model and decoding. It is not trained here.

`DenoiserConfig.adapter` brings it in, and `HostedDenoiser.make_runner`; no other room names it.
"""
