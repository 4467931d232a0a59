# Needs python3.11 or newer, a C++20 compiler and make; everything else goes into .venv.
SHELL := /bin/bash
.DEFAULT_GOAL := help

TORCH := torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
# Tests wait for processes half of the time, so there is one more at a time than cores.
WORKERS := $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
DISTRIBUTION := --dist loadfile --no-loadscope-reorder
WHEELS := build/wheels
WHEEL_ENV := build/wheel-env
PIP := -m pip --disable-pip-version-check install
# What takes long says how far it is; the whole output goes to build/.
PATIENTLY := $(PY) bench/patiently.py
CPP := $(wildcard fuzz/*.cpp fuzz/*.h) $(shell find replay recovery proxy_client proxy_server understudy tests -path '*/csrc/*' \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' \))

# What the installed project is made of. The stamp's name holds a checksum of the list, so that a file
# that went away counts as a change too.
SOURCES := $(sort pyproject.toml CMakeLists.txt $(shell find understudy replay proxy_client \
	proxy_server protos recovery third_party \( -type f -o -type l \) ! -path '*/__pycache__/*' ! -name '*.md' 2>/dev/null))
SOURCES := $(wildcard $(SOURCES))
INSTALLED := $(VENV)/.installed-$(firstword $(shell echo $(SOURCES) | cksum))
# Stamps of what is installed: for building and `make demo`, and for all else. There is one of each for each
# PyTorch asked for: `make setup TORCH=torch==2.11.0` replaces the one that is there.
ASKED := $(if $(filter-out torch==2.13.0,$(TORCH)),-$(TORCH))
FOR_DEMO := $(VENV)/.for-demo$(ASKED)
FOR_ALL := $(VENV)/.for-all$(ASKED)
# The tests whose scripts run on the device that UNDERSTUDY_TEST_DRIVER names.
GPU_TESTS := tests/gpus/test_gpu.py tests/gpus/test_cuda_build.py tests/scripts/test_training.py \
	tests/recovery/test_recovery.py tests/client/test_worker.py tests/jit/test_jit_cuda_watch.py

.PHONY: man options-page operators-page tour odd test-quick test-needs test-binaries test-programs test-wheel sweep soak simulate simulate-hosts simulate-jobs baseline fuzz leak-test help setup setup-demo demo test test-long test-gpu bench bench-gpu \
	bench-snapshots bench-migration bench-hints bench-jit bench-overheads campaign cost conformance lint format clean
help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' Makefile | expand -t 18

# One at a time: two terminals may both ask.
LOCKED := mkdir -p build && flock build/.setup-lock $(MAKE) --no-print-directory
setup:  ## everything into .venv; quickly a no-op when nothing changed
	@$(LOCKED) $(INSTALLED) $(FOR_ALL)

setup-demo:  ## only what `make demo` and `make tour` need
	@$(LOCKED) $(INSTALLED)

$(PY):
	@set -e; for python in $(PYTHON) python3.11 python3 python3.12 python3.13 python3.14; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "setup: $(VENV) from $$($$python --version)"; $$python -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; exit 0; \
	  fi; \
	done; echo "setup: Python 3.11 or newer is needed; found none (name one with PYTHON=...)" >&2; exit 1

# PyTorch first and by itself; the rest comes from pyproject.toml without it, so nothing else can pull it.
$(FOR_DEMO): pyproject.toml Makefile | $(PY)
	@$(PATIENTLY) "setup: $(TORCH)" build/torch.log $(PY) $(PIP) "$(TORCH)"
	@$(PY) -c "$$REQUIREMENTS" demo > $(VENV)/.wanted
	@$(PATIENTLY) "setup: build tools and libraries" build/libraries.log $(PY) $(PIP) "$(TORCH)" -r $(VENV)/.wanted
	@rm -f $(VENV)/.for-demo* && mv $(VENV)/.wanted $@

$(FOR_ALL): $(FOR_DEMO)
	@$(PY) -c "$$REQUIREMENTS" test lint deploy > $(VENV)/.wanted
	@$(PATIENTLY) "setup: what tests and lint need" build/tests.log $(PY) $(PIP) "$(TORCH)" -r $(VENV)/.wanted
	@rm -f $(VENV)/.for-all* && mv $(VENV)/.wanted $@

define REQUIREMENTS
import sys, tomllib
file = tomllib.load(open("pyproject.toml", "rb"))
project = file["project"]
wanted = file["build-system"]["requires"] + project["dependencies"]
for extra in sys.argv[1:]:
    wanted += project["optional-dependencies"][extra]
print(*(one for one in wanted if not one.startswith("torch")), sep="\n")
endef
export REQUIREMENTS

$(INSTALLED): $(SOURCES) $(FOR_DEMO)
	@touch $(VENV)/.begun  # the stamp is as old as the start: a file saved meanwhile is newer
	@$(PY) -m pip uninstall --quiet --yes understudy 2>/dev/null  # its name in former checkouts
	@rm -rf $(WHEELS); $(PATIENTLY) "setup: building the project" build/wheel.log \
	  $(PY) -m pip wheel --verbose --no-build-isolation --no-deps --no-index -w $(WHEELS) .
	@$(PATIENTLY) "setup: installing it" build/install.log \
	  $(PY) $(PIP) --no-deps --no-index --force-reinstall $(WHEELS)/*.whl
	@rm -f $(VENV)/.installed-* && mv $(VENV)/.begun $@

demo: setup-demo  ## train natively, under the proxy, and with a device server killed; compare
	@$(PY) bench/demo.py

tour: setup-demo  ## type the commands of the README's "Use it", and show what they say
	@$(PY) bench/tour.py

man: setup-demo  ## man pages of all commands, build/man; read one with man -l build/man/recoveryctl.1
	@$(PY) -P bench/man_pages.py build/man

options-page: setup-demo  ## docs/options.md, from the commands
	@PYTHONPATH=bench $(PY) -P bench/options_page.py

operators-page: setup-demo  ## docs/operators.md, from PyTorch's dispatcher
	@PYTHONPATH=bench $(PY) -P bench/operators_page.py

test-binaries: setup  ## the C++ programs of the tests, where a source of them has changed
	@$(PY) tests/harness/processes/compiled_programs.py

test-programs: setup  ## programs that others wrote, natively, proxied, and with a server killed; docs/reports/programs.md
	@$(PY) guests/run_guests.py $(OPTIONS)

test-needs: setup  ## CRIU, etcd and what else tests need, below build/, where it can be had; says what cannot
	@$(PY) tests/harness/needs.py

test: setup test-binaries test-needs  ## all files of tests, of costly families a share, against the installed packages
	@$(VENV)/bin/pytest -n $(WORKERS) $(DISTRIBUTION) --durations=30

test-quick: setup test-binaries  ## the mission and the files that cost least, by their budgets three minutes
	@$(VENV)/bin/pytest -n $(WORKERS) $(DISTRIBUTION) --quick $$((170 * $(WORKERS)))

test-wheel: setup  ## the wheel alone in an empty environment: one package is there, and a training with a rank killed
	@rm -rf $(WHEEL_ENV) && $(PY) -m venv $(WHEEL_ENV)
	@$(WHEEL_ENV)/bin/pip --disable-pip-version-check install --quiet "$(TORCH)" numpy
	@$(WHEEL_ENV)/bin/pip --disable-pip-version-check install --quiet "$(TORCH)" $(WHEELS)/*.whl
	@$(WHEEL_ENV)/bin/python -P tests/harness/wheel_contents.py
	@$(WHEEL_ENV)/bin/python bench/demo.py --steps 20
	@rm -rf $(WHEEL_ENV)

test-long: setup test-binaries test-needs  ## in full what `make test` only samples; then all tests, each process started anew
	@UNDERSTUDY_TEST_COLD=1 $(VENV)/bin/pytest -m long
	@UNDERSTUDY_TEST_COLD=1 $(VENV)/bin/pytest -n $(WORKERS) $(DISTRIBUTION)

test-gpu: setup test-binaries  ## the suite with real GPUs, against native CUDA; says so where there is none
	@$(PY) bench/gpu.py --count >/dev/null || { echo "test-gpu: skipped, PyTorch finds no GPU here"; exit 0; }; \
	UNDERSTUDY_TEST_DRIVER=cuda CUBLAS_WORKSPACE_CONFIG=:4096:8 $(VENV)/bin/pytest -m 'long or not long' $(GPU_TESTS)

bench-snapshots: setup  ## snapshots against others' ways: until durable, what training pays, goodput; bench/results
	@OMP_NUM_THREADS=1 $(PY) bench/snapshots/persist_time.py $(OPTIONS)
	@OMP_NUM_THREADS=1 $(PY) bench/snapshots/training_slowdown.py $(OPTIONS)
	@$(PY) bench/snapshots/goodput.py --costs bench/results/slowdown_costs.json \
	  --output bench/results/goodput.json --plot bench/results/goodput.png

bench-migration: setup  ## how long a rank stands still that goes on elsewhere, beside a restart; bench/results/migration.json
	@OMP_NUM_THREADS=1 $(PY) bench/migration/migration_cost.py $(OPTIONS)

bench-jit: setup  ## a fault under understudy.jit in parts, beside torchrun with checkpoints, and none; docs/reports/jit.md
	@OMP_NUM_THREADS=1 $(PY) bench/jit/jit_cost.py $(OPTIONS)

bench-hints: setup  ## paper 000's experiment: hints, fixed intervals and none, undisturbed and killed; docs/reports/hints.md
	@OMP_NUM_THREADS=1 $(PY) bench/hints/hints_cost.py $(OPTIONS)

bench-overheads: setup  ## paper 001's Table 3: what ways of recovering cost while nothing fails; `make cost` shows it. OPTIONS=--quick: a smoke run
	@OMP_NUM_THREADS=1 $(PY) bench/overheads/overheads_cost.py $(OPTIONS)

bench-gpu: setup  ## step times and recovery on real GPUs, bench/results/gpu.json; says so where there is none
	@$(PY) bench/gpu.py

campaign: setup  ## every way of outliving faults, on the same trainings, under the same faults; docs/campaign.md. OPTIONS=--quick: minutes
	@$(PY) bench/make_campaign.py $(OPTIONS)

cost: setup  ## paper 001's bill, printed and computed, and formulas beside a simulation; docs/cost.md
	@$(PY) bench/cost_report.py $(OPTIONS)

bench: setup  ## measure; table, bench/results/latest.json and docs/reports/performance.md
	@$(PY) bench/bench.py

sweep: setup  ## a fault at every call of a minibatch of three models; nothing may change; goes on where it stopped
	@$(PY) sweep/fault_sweep.py $(OPTIONS)

soak: setup  ## 200 random faults in one training of char_gpt, some during recoveries; docs/soak.md
	@$(PY) sweep/soak.py $(OPTIONS)

odd: setup  ## 5,000 random programs: natively, proxied, with a fault at a random record; goes on where it stopped
	@$(PY) odd/campaign.py $(OPTIONS)

conformance: setup  ## PyTorch's own operator, module and optimizer databases, natively and on the device; compare
	@$(PY) conformance/sweep.py $(OPTIONS)

baseline: setup  ## count the client's instructions per call and make them the baseline of the tests
	@$(PY) bench/instructions.py --write-baseline

simulate-hosts: setup  ## 100,000 schedules of hosts that are cut off and proxyds that die, in virtual time
	@PYTHONPATH=tests/harness $(PY) -P -m hosts_simulation $(OPTIONS)

simulate-jobs: setup  ## 100,000 schedules of jobs on several hosts: servers fail or hang, proxyds, links, devices, hosts and etcd fail, in virtual time
	@PYTHONPATH=tests/harness $(PY) -P -m job_simulation $(OPTIONS)

simulate: setup  ## 100,000 fault schedules through the real planner and coordinator, in virtual time
	@PYTHONPATH=tests/harness $(PY) -P -m simulation $(OPTIONS)

fuzz:  ## libFuzzer on the readers of shared memory, FUZZ_SECONDS each (60); says so where there is no clang
	@python3 fuzz/run_fuzzer.py --seconds $(or $(FUZZ_SECONDS),60) $(OPTIONS)

leak-test: setup  ## 10,000 steps: nothing may grow
	@$(PY) bench/leak.py --steps 10000

lint: setup  ## ruff, mypy, clang-format, what test files may cost: report
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(PY) -m mypy understudy bench conformance sweep odd guests examples fuzz tests
	@$(if $(CPP),$(VENV)/bin/clang-format --dry-run -Werror $(CPP))
	@$(PY) tests/harness/durations.py --check

format: setup  ## ruff and clang-format: rewrite
	@$(VENV)/bin/ruff check --fix-only --quiet .
	@$(VENV)/bin/ruff format .
	@$(if $(CPP),$(VENV)/bin/clang-format -i $(CPP))

clean:  ## forget .venv and all build products
	rm -rf $(VENV) build bench/results conformance/results sweep/results .ruff_cache
