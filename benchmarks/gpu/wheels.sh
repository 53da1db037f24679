#!/usr/bin/env bash
# Fetch what Forebay and its GPU tests need beside torch, transformers, peft, numpy, pyarrow, rich, typer, jinja2,
# matplotlib and pytest, for a GPU machine without a network: wheels for Python 3.12 on x86-64 Linux, under 60 MB.
#
#   benchmarks/gpu/wheels.sh wheels                                                    # here, with a network
#   pip install --no-index --no-deps wheels/*.whl && PYTHONPATH=src python benchmarks/gpu/run_all.py    # there
set -euo pipefail
folder=${1:?usage: wheels.sh FOLDER}
root=$(cd "$(dirname "$0")/../.." && pwd)
names=(annotated-types bitsandbytes execnet hypothesis msgspec plotext psutil pydantic pydantic-core pytest-asyncio
  pytest-timeout pytest-xdist sortedcontainers sqlalchemy tomli-w typing-inspection)
platforms=()
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${platform}_x86_64")
done
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" --constraint "$root/constraints.txt" --dest "$folder" "${names[@]}"
# 8-bit moments: of the libraries for each CUDA those for 13 are kept.
zip --quiet --delete "$folder"/bitsandbytes-*.whl "*libbitsandbytes_cuda1[12]*" "*libbitsandbytes_rocm*" "*libbitsandbytes_xpu*"
du -sh "$folder"
