# Each target sets up what it needs by itself; `make` alone lists them.
# ARGS goes to the tool behind a target: make lab ARGS="--port 9000", make test ARGS="-k data".

BIN := .venv/bin

# Tools start others by name: Jupyter its kernels, nbgrader its database migrations.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# A kernel of the same name in the reader's home must not stand in for this environment's.
export JUPYTER_PREFER_ENV_PATH := 1

# A notebook runs in notebooks/, where a path relative to here would point elsewhere.
ifneq ($(COURSE_DATA),)
override COURSE_DATA := $(if $(filter /% ~%,$(firstword $(COURSE_DATA))),,$(CURDIR)/)$(COURSE_DATA)
export COURSE_DATA
endif

# As they were typed, whatever is in them: a path may have a $.
override SUBMISSIONS := $(value SUBMISSIONS)
override OUT := $(value OUT)
export SUBMISSIONS OUT
assignments grade: export PYTHONPATH := $(CURDIR)/notebooks/assignments

# Only a learner's own JupyterLab fetches data; COURSE_OFFLINE=0 lets these do it too.
test run notebooks: export COURSE_OFFLINE ?= 1

.PHONY: help setup lab test run notebooks assignments grade test-grading test-gpu-stack \
    book test-browser bench reproduce doctor lint lock clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
	    while IFS='|' read -r name does; do printf '  make %-12s %s\n' "$$name" "$$does"; done

setup:  ## make .venv, or bring it up to date (every target does this first); TORCH=1: with PyTorch
	@sh requirements/setup.sh

lab: export JUPYTER_CONFIG_PATH := $(CURDIR)/notebooks/src/lab$(if $(JUPYTER_CONFIG_PATH),:$(JUPYTER_CONFIG_PATH))
lab: setup  ## open the course in JupyterLab, on this machine only
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

test: setup  ## run all tests, every chapter among them (settings: pyproject.toml)
	$(BIN)/python -m pytest $(ARGS)

run: setup  ## run the chapters, CH="01 03" or all, and show how long each takes
	$(BIN)/python notebooks/src/run.py $(CH)

notebooks: setup  ## rebuild the chapters, CH="01 03" or all, from notebooks/src
	$(BIN)/python notebooks/src/build.py $(CH)

assignments: setup  ## make the student versions of the assignments, in build/assignments/release
	$(BIN)/python -m marking release

grade: setup  ## mark the assignments in SUBMISSIONS=folder; marks and feedback in folder-marks
	@: $(if $(SUBMISSIONS),,$(error name the folder: make grade SUBMISSIONS=folder))
	@$(BIN)/python -m marking grade "$$SUBMISSIONS" $${OUT:+"$$OUT"}

test-grading: setup  ## test the marking: right, wrong and hostile solutions
	$(BIN)/python -m pytest tests/grading $(ARGS)

test-gpu-stack: setup  ## test the build for GPUs, in build/gpu-stack (fetches 3 GB); needs no GPU
	$(BIN)/python -m pytest tests/gpu_stack $(ARGS)

book: setup  ## make the course a web site, build/book/index.html
	rm -rf build/book
	$(BIN)/sphinx-build -W --keep-going -q -c notebooks/book notebooks build/book

test-browser: setup  ## test JupyterLab and the book in a browser, Debian's Chromium
	$(BIN)/python -m pytest tests/browser $(ARGS)

bench: setup  ## measure speed beside PyTorch and the machine's limits; ARGS=--quick to try it
	PYTHONPATH="$(CURDIR)" $(BIN)/python tests/bench/bench.py $(ARGS)

reproduce: setup  ## train the published experiments at full size; ARGS=--quick for a few batches
	PYTHONPATH="$(CURDIR)" $(BIN)/python tests/bench/reproduce.py $(ARGS)

doctor: setup  ## say what this machine can do, and what to do about what it can't
	$(BIN)/python -m helpers.doctor

lint: setup  ## look for mistakes in the code without running it
	$(BIN)/ruff check $(ARGS)

lock:  ## resolve requirements/cpu.in and gpu.in into .txt; ARGS=--upgrade for newer versions
	for build in cpu gpu; do \
	    "$$(sh requirements/setup.sh --find-uv)" pip compile --quiet --universal \
	        --python-version 3.11 --generate-hashes --no-header --no-annotate $(ARGS) \
	        requirements/$$build.in -o requirements/$$build.txt || exit; \
	done

clean:  ## remove build/ and caches; .venv and the notebooks stay
	rm -rf build .pytest_cache .hypothesis .ruff_cache
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) \
	    -prune -exec rm -rf {} +
