# Each target sets up what it needs by itself; `make` alone lists them.
# ARGS goes to the tool behind a target: make lab ARGS="--port 9000", make test ARGS="-k data".

BIN := .venv/bin

# Tools start others by name: nbgrader its database migrations.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# A kernel of the same name in the reader's home must not stand in for this environment's.
export JUPYTER_PREFER_ENV_PATH := 1

# A notebook runs in notebooks/, where a path relative to here would point elsewhere. (`override`:
# also where it is typed as `make run COURSE_DATA=data`.)
ifneq ($(COURSE_DATA),)
override export COURSE_DATA := $(if $(filter /% ~%,$(firstword $(COURSE_DATA))),,$(CURDIR)/)$(COURSE_DATA)
endif

# Tools keep caches and settings in the home; where that can't be written to, in build/home.
ifneq ($(shell [ -w "$$HOME" ] || echo no),)
$(shell echo "The home, $$HOME, can't be written to: caches and settings go to build/home" >&2)
export HOME := $(CURDIR)/build/home
endif

assignments grade: export PYTHONPATH := $(CURDIR)/notebooks/assignments

# Only a learner's own JupyterLab fetches data; COURSE_OFFLINE=0 lets these do it too.
run notebooks: export COURSE_OFFLINE ?= 1

.PHONY: help setup lab test test-deeper test-tools test-grading test-browser test-gpu-stack test-all \
    run notebooks assignments grade book bench reproduce doctor lint lock clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | \
	    while IFS='|' read -r name does; do printf '  make %-15s %s\n' "$$name" "$$does"; done

setup:  ## make .venv, or bring it up to date; TORCH=1: with PyTorch
	@sh requirements/setup.sh

# JupyterLab as the course wants it; what the reader has set in it goes before.
lab: export JUPYTER_CONFIG_PATH := $(CURDIR)/notebooks/src/lab$(if $(value \
    JUPYTER_CONFIG_PATH),:$(value JUPYTER_CONFIG_PATH))
lab: setup  ## open the course in JupyterLab, on this machine only
	$(BIN)/python -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

# Two files at a time (pyproject.toml), offline and with few rounds (set_up_tests in build.py).
test: setup  ## run the chapters and what they rest on as tests; it is what a bare pytest runs
	$(BIN)/python -m pytest $(ARGS)

# What a test belongs to is told by its folder: after a change, run that one.
test-deeper: setup  ## test the optional notebooks
	$(BIN)/python -m pytest notebooks/deeper $(ARGS)

test-tools: setup  ## test set-up, doctor, bench, GitHub's files, and programs in hard cases
	$(BIN)/python -m pytest tests/tools $(ARGS)

test-grading: setup  ## test the marking: right, wrong and hostile solutions
	$(BIN)/python -m pytest tests/marking $(ARGS)

test-browser: setup  ## test JupyterLab and the book in a browser, Debian's Chromium
	$(BIN)/python -m pytest tests/browser -n 0 $(ARGS)

test-gpu-stack: setup  ## test the build for GPUs, in build/gpu-stack (fetches 3 GB); needs no GPU
	$(BIN)/python -m pytest tests/gpu_stack -n 0 $(ARGS)

test-all: test test-deeper test-tools test-grading test-browser test-gpu-stack  ## run all of them

run: setup  ## run the chapters, CH="01 deeper/03" or all, and show how long each takes
	set -f; $(BIN)/python notebooks/src/run.py $$CH

notebooks: setup  ## rebuild the chapters, CH as above; ARGS=--prose: without running them
	set -f; $(BIN)/python notebooks/src/build.py $$CH $(ARGS)

assignments: setup  ## make the student versions of the assignments, in build/assignments/release
	$(BIN)/python -m marking release

grade: setup  ## mark the assignments in SUBMISSIONS=folder; marks and feedback in folder-marks
	@: $(if $(value SUBMISSIONS),,$(error name the folder: make grade SUBMISSIONS=folder))
	@$(BIN)/python -m marking grade "$$SUBMISSIONS" $${OUT:+"$$OUT"}

book: setup  ## make the course a web site, build/book/index.html
	rm -rf build/book build/book-source
	mkdir -p build/book-source/src build/book
	cp -r notebooks/[0-9]*.ipynb notebooks/deeper notebooks/*.py \
	    notebooks/src/book/index.md build/book-source
	cp -r notebooks/src/drawings notebooks/src/figures build/book-source/src
	$(BIN)/python -m sphinx -W --keep-going -q -c notebooks/src/book \
	    -d build/book-source/.doctrees build/book-source build/book
	cp LICENSE build/book/LICENSE.txt
	@git ls-files --modified 'notebooks/[0-9]*.ipynb' notebooks/deeper 2>/dev/null | \
	    sed "s|.*|build/book shows your own version of & (for the course's: git restore &)|" >&2

bench: setup  ## measure speed beside PyTorch and the machine's limits; ARGS=--quick to try it
	PYTHONPATH="$$PWD" $(BIN)/python notebooks/src/bench/bench.py $(ARGS)

reproduce: setup  ## train the published experiments at full size; ARGS=--quick for a few batches
	PYTHONPATH="$$PWD" $(BIN)/python notebooks/src/bench/reproduce.py $(ARGS)

doctor:  ## say what this machine can do, and what to do about what it can't; works before set-up
	@python=$$(sh requirements/setup.sh --find-any) && "$$python" requirements/doctor.py

lint: setup  ## look for mistakes in the code without running it
	$(BIN)/python -m ruff check $(ARGS)

lock:  ## resolve requirements/cpu.in and gpu.in into .txt; ARGS=--upgrade for newer versions
	uv=$$(sh requirements/setup.sh --get-uv) && for build in cpu gpu; do \
	    "$$uv" pip compile --quiet --universal \
	        --python-version 3.11 --generate-hashes --no-header --no-annotate $(ARGS) \
	        requirements/$$build.in -o requirements/$$build.txt || exit; \
	done

clean:  ## remove caches, and build/ but for build/reproduce and build/assignments; .venv stays
	rm -rf .pytest_cache .ruff_cache
	[ ! -d build ] || find build -mindepth 1 -maxdepth 1 ! -name reproduce ! -name assignments \
	    -exec rm -rf {} +
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) \
	    -prune -exec rm -rf {} +
