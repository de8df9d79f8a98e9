"""Compare int8 and int4 weights with bfloat16, then write an int4 model that is memory-mapped instead of loaded."""

import subprocess
import sys
import tempfile
from pathlib import Path

from penstock import LLM, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=16)

for options in ({}, {"quantization": "int8"}, {"quantization": "int4", "quantization_group_size": 32}):
    with LLM(model="demo", **options) as llm:
        print(options or "bfloat16", llm.generate("Once upon a time", params)[0].outputs[0].text)

with tempfile.TemporaryDirectory() as folder:
    packed = Path(folder) / "demo-int4"
    command = ["convert", "demo", str(packed), "--quantization", "int4", "--quantization-group-size", "32"]
    subprocess.run([sys.executable, "-m", "penstock", *command], check=True)
    size = sum(file.stat().st_size for file in packed.iterdir())
    with LLM(model=str(packed)) as llm:
        print(f"packed, {size / 1e6:.1f} MB:", llm.generate("Once upon a time", params)[0].outputs[0].text)
