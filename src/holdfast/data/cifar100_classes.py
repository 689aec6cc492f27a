"""The hundred classes of CIFAR-100 and their twenty superclasses."""

import difflib
from collections.abc import Sequence

__all__ = ["CLASSES", "SUPERCLASSES", "find", "same_superclass", "superclass_of"]

SUPERCLASSES = {
    "aquatic_mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
    "fish": ("aquarium_fish", "flatfish", "ray", "shark", "trout"),
    "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
    "food_containers": ("bottle", "bowl", "can", "cup", "plate"),
    "fruit_and_vegetables": ("apple", "mushroom", "orange", "pear", "sweet_pepper"),
    "household_electrical_devices": ("clock", "keyboard", "lamp", "telephone", "television"),
    "household_furniture": ("bed", "chair", "couch", "table", "wardrobe"),
    "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
    "large_carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
    "large_man-made_outdoor_things": ("bridge", "castle", "house", "road", "skyscraper"),
    "large_natural_outdoor_scenes": ("cloud", "forest", "mountain", "plain", "sea"),
    "large_omnivores_and_herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
    "medium_mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
    "non-insect_invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
    "people": ("baby", "boy", "girl", "man", "woman"),
    "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
    "small_mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
    "trees": ("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"),
    "vehicles_1": ("bicycle", "bus", "motorcycle", "pickup_truck", "train"),
    "vehicles_2": ("lawn_mower", "rocket", "streetcar", "tank", "tractor"),
}

CLASSES = tuple(sorted(name for names in SUPERCLASSES.values() for name in names))
"""In the order of the original labels 0 to 99, which is alphabetical."""


def find(name: str) -> int:
    """The original label of a class.

    Raises:
        ValueError: There is no such class; the message has the nearest names.
    """
    if name in CLASSES:
        return CLASSES.index(name)
    near = difflib.get_close_matches(name.lower().replace(" ", "_"), CLASSES, n=3, cutoff=0.4)
    near += [c for c in CLASSES if name.lower() in c and c not in near]
    hint = f"; the nearest are {', '.join(near[:4])}" if near else ""
    group = "; it is a superclass, a task takes one of its classes" if name in SUPERCLASSES else ""
    raise ValueError(f"CIFAR-100 has no class {name!r}{group}{hint}")


def superclass_of(name: str) -> str:
    """The superclass of a class."""
    find(name)
    return next(group for group, names in SUPERCLASSES.items() if name in names)


def same_superclass(names: Sequence[str]) -> str:
    """The superclass that all names share.

    Raises:
        ValueError: A name does not exist, or they differ in superclass.
    """
    groups = {name: superclass_of(name) for name in names}
    if len(set(groups.values())) > 1:
        listed = ", ".join(f"{name} is in {group}" for name, group in groups.items())
        raise ValueError(
            f"classes in the same place of every task share a superclass, but {listed}"
        )
    return next(iter(groups.values()))
