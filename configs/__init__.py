"""The YAML recipes that come with holdfast; run one by its name, as in ``holdfast run flax_digits``."""
