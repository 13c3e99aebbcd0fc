"""Recipes: a TOML file, checked against a frozen schema before anything runs."""

from sinkflex.config.load import Key, dump_recipe, load_recipe, schema_keys
from sinkflex.config.recipe import Recipe
from sinkflex.config.shipped import find_recipe, shipped_recipes

__all__ = ["Key", "Recipe", "dump_recipe", "find_recipe", "load_recipe", "schema_keys", "shipped_recipes"]
