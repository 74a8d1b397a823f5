# make run: set up and watch the main job.  make test: set up and pass the tests.  Everything lives in .venv.
PYTHON ?= python3
# Without a GPU any CPU build of this version will do; set TORCH to choose another wheel.
TORCH ?= torch==2.13.0
PIP = .venv/bin/python -m pip --disable-pip-version-check install --quiet
UV = .venv/bin/python tools/uv.py
UV_INSTALL = $(UV) pip install --quiet --python .venv/bin/python
# uv, unlike pip, compiles nothing when it installs: each module's first import does, and has to be allowed to keep it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run run-vllm test test-all test-engines test-engine-vllm test-engine-sglang test-newest lock-engines lock-docs lint wheel soak soak-engine mutants docs pictures bench train lock clean

setup: .venv/ready

.venv/ready: requirements.lock pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvarve needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up .venv (torch first, then what requirements.lock pins) ..."
	@$(PYTHON) -m venv .venv
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > .venv/uv.txt
	@$(PIP) --require-hashes --no-deps -r .venv/uv.txt
	@$(UV_INSTALL) "$(TORCH)" --constraints requirements.lock
	@$(UV_INSTALL) --require-hashes --no-deps -r requirements.lock
	@$(UV_INSTALL) --no-deps -e .
	@touch $@

run: setup
	.venv/bin/kvarve demo --out out

# The same with vLLM computing, which is set up in .venv-vllm.
run-vllm: .venv-vllm/ready
	.venv/bin/kvarve demo --engine vllm --out out

# While types are checked, the byte code of all that is tested is made, which else each of pytest's processes would do.
test: setup
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	@.venv/bin/python -m pytest --collect-only > /dev/null 2>&1 & .venv/bin/mypy; ended=$$?; wait; exit $$ended
	.venv/bin/python -m pytest --numprocesses 3 --dist loadfile

# With the long tests (every family, every place to cut the power, ...), long lives, a sample of the mutants and the engines:
# hours, part by part, to be gone on with where it was cut off; out/test-all.json says how they ended. PART=engines runs some.
# test-NAME runs all tests in tests/NAME and all files test_NAME*.py, for example test-storage, test-hf3fs.
test-all: setup
	.venv/bin/python tools/test_all.py $(addprefix --part ,$(PART))

# kvarve inside of vLLM and of SGLang on this CPU, each in a venv of its own, by whose Python its tests are run: the short
# form, in minutes; make test-engines ENGINE_ARGS="-m ''" runs all. vLLM's wheel brings a torchvision for CUDA, one import of
# which fails beside torch for the CPU, and registers nothing that is used here. (It is replaced, not emptied: a file that uv
# has installed may be uv's own.) SGLang's requirements want CUDA, so its lock has what is needed of them.
ENGINE_ARGS ?=
ENGINE_TESTS = -m pytest -W ignore --confcutdir tests/engines --numprocesses 2 $(ENGINE_ARGS)
test-engines: test-engine-vllm test-engine-sglang

test-engine-vllm: .venv-vllm/ready
	.venv-vllm/bin/python $(ENGINE_TESTS) tests/engines --ignore tests/engines/hicache

test-engine-sglang: .venv-sglang/ready
	.venv-sglang/bin/python $(ENGINE_TESTS) tests/engines/hicache

.venv-%/ready: tests/engines/%.lock pyproject.toml Makefile | setup
	@echo "Setting up .venv-$* ..."
	@$(PYTHON) -m venv --without-pip .venv-$*
	@$(UV) pip install --quiet --python .venv-$*/bin/python "$(TORCH)" --constraints tests/engines/$*.lock
	@$(UV) pip install --quiet --python .venv-$*/bin/python --require-hashes --no-deps -r tests/engines/$*.lock
	@$(UV) pip install --quiet --python .venv-$*/bin/python --no-deps -e .
	@for path in .venv-$*/lib/python*/site-packages/torchvision/_meta_registrations.py; do \
		if [ -f $$path ]; then rm $$path && touch $$path; fi; done
	@touch $@

# The short form with the newest release of each dependency; what is new, and what broke.
test-newest: setup
	.venv/bin/python tools/newest.py

test-%: setup
	.venv/bin/python -m pytest -m '' --numprocesses 3 --dist loadfile $(wildcard tests/$* tests/test_$**.py tests/*/test_$**.py)

lint: setup
	.venv/bin/ruff check --fix
	.venv/bin/ruff format
	.venv/bin/mypy

# The wheel is built from the source archive, so that nothing gets into it which an earlier build has left behind.
wheel: setup
	$(UV) build --quiet --out-dir dist

# Ten million steps of the core in random lives under random faults, on all cores; another SEED gives other lives.
SEED ?= 7
soak: setup
	.venv/bin/python -m tests.sim.world --seed $(SEED) --steps 10000000 --jobs $$(getconf _NPROCESSORS_ONLN) --all
	.venv/bin/python -m tests.sim.world --engine --seed $(SEED) --steps 1000000 --jobs $$(getconf _NPROCESSORS_ONLN) --all
	.venv/bin/python -m tests.sim.world --ranks --seed $(SEED) --steps 300000 --jobs $$(getconf _NPROCESSORS_ONLN) --all

# Hours of conversations with a real engine whose device holds a twentieth of them; every answer is compared.
MINUTES ?= 120
soak-engine: setup
	.venv/bin/python -m tests.sim.traffic --minutes $(MINUTES) --seed $(SEED) --json out/traffic.json --png out/traffic.png

# Each wrong variant of the code in tools/mutants.toml has to make a test fail; some minutes.
mutants: setup
	.venv/bin/python tools/mutants.py

# Rewrites the generated blocks of the pages in docs/, and makes a site of them in out/site, every link of which is checked.
docs: setup .venv-docs/ready
	.venv/bin/python tools/docs.py
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --config-file tools/site/mkdocs.yml

.venv-docs/ready: tools/site/requirements.lock Makefile | setup
	@echo "Setting up .venv-docs ..."
	@$(PYTHON) -m venv --without-pip .venv-docs
	@$(UV) pip install --quiet --python .venv-docs/bin/python --require-hashes --no-deps -r tools/site/requirements.lock
	@touch $@

bench: setup
	@for script in $(filter-out benchmarks/common.py benchmarks/pretend.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; .venv/bin/python $$script || exit 1; done

# The pictures of the live page: Chromium shows a real server under load.
pictures: setup
	PYTHONPATH=tests/server .venv/bin/python tools/pictures.py docs

train: setup
	.venv/bin/python tools/train_tiny_hybrid.py

# torch is installed first and by itself (see TORCH), so the lock leaves it out, whoever requires it; it has hashes and no URLs.
lock: setup
	echo 'torch; python_version < "3"' > .venv/none.txt
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --extra dev --extra compress --extra mooncake --extra redis --extra s3 --extra storage-key --extra otel \
		--extra events --extra quantized --override .venv/none.txt --no-header --no-annotate pyproject.toml -o requirements.lock

# The versions of what the engines need, with hashes; torch as for kvarve itself, and no sound or video.
LOCK = $(UV) pip compile --quiet --python-version 3.11 --generate-hashes --no-header --no-annotate
lock-engines: setup
	$(LOCK) --no-emit-package torch --no-emit-package torchaudio --no-emit-package torchcodec tests/engines/vllm.in \
		-o tests/engines/vllm.lock
	$(LOCK) --no-deps tests/engines/sglang.in -o tests/engines/sglang.lock

lock-docs: setup
	$(LOCK) --universal tools/site/requirements.in -o tools/site/requirements.lock

clean:
	rm -rf .venv .venv-vllm .venv-sglang .venv-docs .venv-newest dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
