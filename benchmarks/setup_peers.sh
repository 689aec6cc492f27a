#!/bin/sh
# Makes a virtual environment of its own for the peers (about 2 GB): benchmarks/setup_peers.sh [folder]
# Each peer is optional: one that cannot be installed is left out of the comparison and named there.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-"${XDG_CACHE_HOME:-$HOME/.cache}/holdfast/peers"}
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
# torchvision pairs with one torch only; unpinned it brings another torch and its CUDA packages
printf 'torch==2.13.0\ntorchvision==0.28.0\n' > "$constraints"
export PIP_CONSTRAINT="$constraints" PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder"
pip="$folder/bin/pip install --quiet"
$pip torch numpy rich safetensors typer
$pip --no-deps -e "$here/.."
$pip --no-deps nngeometry==0.4 || echo "nngeometry: not installed"
$pip --no-deps backpack-for-pytorch==1.7.1 && $pip einops unfoldnd packaging || echo "BackPACK: not installed"
$pip --no-deps torchvision==0.28.0 && $pip pillow || echo "torchvision: not installed"
$pip laplace-torch==0.3 || echo "laplace-torch: not installed"
$pip avalanche-lib==0.6.0 || echo "Avalanche: not installed"
echo "$folder/bin/python"
