# Each target sets up what it needs by itself; `make` alone lists them.
# ARGS goes to the tool behind a target: make lab ARGS="--port 9000", make test ARGS="-k data".

BIN := .venv/bin

# What is typed after `make` is handed on as it is: Make would read a $ in a path as its own.
$(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),\
    $(eval override export $(name) := $$(value $(name)))))
override ARGS := $(value ARGS)

# Tools start others by name: nbgrader its database migrations.
export PATH := $(CURDIR)/$(BIN):$(value PATH)
# A kernel of the same name in the reader's home must not stand in for this environment's.
export JUPYTER_PREFER_ENV_PATH := 1

# A notebook runs in notebooks/, where a path relative to here would point elsewhere.
given := $(value COURSE_DATA)
ifneq ($(given),)
override export COURSE_DATA := $(if $(filter /% ~%,$(firstword $(given))),,$(CURDIR)/)$(given)
endif

# What tools keep in the home, where that can't be written to. What a reader has set stays.
ifneq ($(shell [ -w "$$HOME" ] || echo no),)
$(shell echo "The home, HOME=$$HOME, can't be written to: caches and settings go to build/home" >&2)
export UV_CACHE_DIR ?= $(CURDIR)/build/home/uv
export UV_PYTHON_INSTALL_DIR ?= $(CURDIR)/build/home/pythons
export PIP_CACHE_DIR ?= $(CURDIR)/build/home/pip
export JUPYTER_CONFIG_DIR ?= $(CURDIR)/build/home/jupyter-config
export JUPYTER_DATA_DIR ?= $(CURDIR)/build/home/jupyter
export IPYTHONDIR ?= $(CURDIR)/build/home/ipython
export MPLCONFIGDIR ?= $(CURDIR)/build/home/matplotlib
endif

assignments grade: export PYTHONPATH := $(CURDIR)/notebooks/assignments

# Few rounds where a cell measures or demonstrates: COURSE_ROUNDS=all takes all of them.
test: export COURSE_ROUNDS ?= few

# Only a learner's own JupyterLab fetches data; COURSE_OFFLINE=0 lets these do it too.
test run notebooks: export COURSE_OFFLINE ?= 1

.PHONY: help setup lab test run notebooks assignments grade test-grading test-gpu-stack \
    book test-browser bench reproduce doctor lint lock clean

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

# Two files at a time, by pytest-xdist. A chapter measures beside another file then, which is why no
# test asserts a time; cells of one chapter stay together, in one kernel (loadfile).
test: setup  ## run all tests, every chapter among them (settings: pyproject.toml)
	$(BIN)/python -m pytest $(if $(strip $(ARGS)),$(ARGS),tests notebooks -n 2 --dist loadfile)

run: setup  ## run the chapters, CH="01 deeper/03" or all, and show how long each takes
	set -f; $(BIN)/python notebooks/src/run.py $$CH

notebooks: setup  ## rebuild the chapters, CH as above; ARGS=--prose: without running them
	set -f; $(BIN)/python notebooks/src/build.py $$CH $(ARGS)

assignments: setup  ## make the student versions of the assignments, in build/assignments/release
	$(BIN)/python -m marking release

grade: setup  ## mark the assignments in SUBMISSIONS=folder; marks and feedback in folder-marks
	@: $(if $(value SUBMISSIONS),,$(error name the folder: make grade SUBMISSIONS=folder))
	@$(BIN)/python -m marking grade "$$SUBMISSIONS" $${OUT:+"$$OUT"}

test-grading: setup  ## test the marking: right, wrong and hostile solutions
	$(BIN)/python -m pytest tests/grading $(ARGS)

test-gpu-stack: setup  ## test the build for GPUs, in build/gpu-stack (fetches 3 GB); needs no GPU
	$(BIN)/python -m pytest tests/gpu_stack $(ARGS)

book: setup  ## make the course a web site, build/book/index.html
	rm -rf build/book build/book-source
	mkdir -p build/book-source/src build/book
	cp -r notebooks/[0-9]*.ipynb notebooks/deeper notebooks/*.py notebooks/map.md \
	    notebooks/src/book/index.md build/book-source
	cp -r notebooks/src/drawings notebooks/src/figures build/book-source/src
	$(BIN)/python -m sphinx -W --keep-going -q -c notebooks/src/book \
	    -d build/book-source/.doctrees build/book-source build/book
	cp LICENSE build/book/LICENSE.txt

test-browser: setup  ## test JupyterLab and the book in a browser, Debian's Chromium
	$(BIN)/python -m pytest tests/browser $(ARGS)

bench: setup  ## measure speed beside PyTorch and the machine's limits; ARGS=--quick to try it
	PYTHONPATH="$$PWD" $(BIN)/python tests/bench/bench.py $(ARGS)

reproduce: setup  ## train the published experiments at full size; ARGS=--quick for a few batches
	PYTHONPATH="$$PWD" $(BIN)/python tests/bench/reproduce.py $(ARGS)

doctor:  ## say what this machine can do, and what to do about what it can't; works before set-up
	@python=$$(sh requirements/setup.sh --find-any) || { \
	    echo "The doctor needs a Python from 3.8 on, and there is none here. Set-up needs Python" \
	        "3.11, or uv, which fetches it." >&2; exit 1; }; \
	"$$python" requirements/doctor.py

lint: setup  ## look for mistakes in the code without running it
	$(BIN)/python -m ruff check $(ARGS)

lock:  ## resolve requirements/cpu.in and gpu.in into .txt; ARGS=--upgrade for newer versions
	uv=$$(sh requirements/setup.sh --get-uv) && for build in cpu gpu; do \
	    "$$uv" pip compile --quiet --universal \
	        --python-version 3.11 --generate-hashes --no-header --no-annotate $(ARGS) \
	        requirements/$$build.in -o requirements/$$build.txt || exit; \
	done

clean:  ## remove build/ and caches; .venv and the notebooks stay
	rm -rf build .pytest_cache .hypothesis .ruff_cache
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) \
	    -prune -exec rm -rf {} +
