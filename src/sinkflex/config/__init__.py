"""Recipes: a TOML file, checked against a frozen schema before anything runs."""

from sinkflex.config.load import Key, dump_recipe, load_recipe, schema_keys
from sinkflex.config.recipe import Recipe

__all__ = ["Key", "Recipe", "dump_recipe", "load_recipe", "schema_keys"]
