"""Recipes: one per study. A new one is one file and one line in ``RECIPES``."""

from collections.abc import Mapping

from holdfast.recipes.cifar100 import CIFAR100Recipe
from holdfast.recipes.frontier import FrontierRecipe
from holdfast.recipes.permuted_mnist import PermutedMNISTRecipe
from holdfast.recipes.recipe import Recipe, Request, Score
from holdfast.recipes.toy import ToyRecipe

__all__ = ["RECIPES", "Recipe", "Request", "Score"]

RECIPES: Mapping[str, Recipe] = {
    "toy": ToyRecipe(),
    "permuted-mnist": PermutedMNISTRecipe(),
    "cifar100": CIFAR100Recipe(),
    "frontier": FrontierRecipe(),
}
