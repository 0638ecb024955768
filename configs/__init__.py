"""The bundled YAML configurations; run one by its name, as in ``holdfast run flax_digits``."""
