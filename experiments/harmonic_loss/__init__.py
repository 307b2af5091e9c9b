"""The experiments of Baek et al. 2025, Harmonic Loss Trains Interpretable AI Models."""
