"""The trace page: one file of HTML that plays the denoising, in any browser and without a network."""
