# Every target first fills .venv with what it needs of the tested set of packages, once.

PYTHON ?= python3
BIN := .venv/bin
# What trains and draws; with it what tests and checks; what quantizes, for its tests alone.
DEMO_INSTALLED := .venv/.demo-installed
INSTALLED := .venv/.installed
QUANTIZED := .venv/quantized
ECOSYSTEM := .venv/ecosystem
UPSTREAM := .venv/upstream

# One process, on the first GPU if there is one: several GPUs would need several processes.
# Without the number of threads, accelerate would allow PyTorch a single CPU core.
THREADS := $(or $(OMP_NUM_THREADS),$(shell getconf _NPROCESSORS_ONLN))
TRAIN := CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES-0} $(BIN)/accelerate launch \
	--num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	--num_cpu_threads_per_process $(THREADS) scripts/sft.py

PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal
# "All" leaves out what needs a GPU, the network, or packages of its own.
ALL := not cuda and not network and not quantized and not ecosystem and not browser

.PHONY: demo demo-compare test test-all test-quantized test-ecosystem test-upstream test-browser wheel-test \
	check audit docs size clean

demo: $(DEMO_INSTALLED)
	$(TRAIN) configs/demo_base.yaml resume=true
	$(TRAIN) configs/demo_constant.yaml resume=true
	$(TRAIN) configs/demo.yaml resume=true
	$(BIN)/harmonic-sft compare runs/demo_base runs/demo_constant runs/demo --figure runs/demo.png
	$(BIN)/harmonic-sft eval runs/demo

demo-compare: demo
	$(TRAIN) configs/demo_linear.yaml resume=true
	$(BIN)/harmonic-sft compare runs/demo_base runs/demo_linear runs/demo_constant runs/demo \
		--figure runs/comparison.png

test: $(INSTALLED)
	$(PYTEST)

test-all: $(INSTALLED)
	$(PYTEST) -m '$(ALL)'

test-quantized: $(INSTALLED) $(QUANTIZED)/.installed
	PYTHONPATH="$(CURDIR)/$(QUANTIZED)" $(BIN)/python -m pytest -m quantized

# Other people's tools, in an environment that sees .venv: imported there, they would slow every test.
test-ecosystem: $(ECOSYSTEM)/.installed
	$(ECOSYSTEM)/bin/python -m pytest -m ecosystem

# transformers' own model tests, from its source distribution. Those of generation and export are in its
# repository alone: make test-upstream TRANSFORMERS_SOURCE=/path/to/checkout
test-upstream: $(UPSTREAM)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(UPSTREAM)/bin/python contrib/transformers/run_tests.py \
		$(UPSTREAM)/source $(if $(TRANSFORMERS_SOURCE),--checkout "$(TRANSFORMERS_SOURCE)") \
		--numprocesses auto --maxprocesses 4 --dist worksteal

# Opens the HTML report in a real browser. On Debian: sudo apt-get install --no-install-recommends chromium
test-browser: $(INSTALLED)
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { echo "browser: expected Chromium, got none." \
		"On Debian run: sudo apt-get install --no-install-recommends chromium" >&2; exit 1; }
	$(BIN)/python -m pytest -m browser

# Builds wheel and sdist, installs the wheel into an environment of its own that links torch and the
# other requirements from .venv, and trains two steps of the demo there, in another folder.
wheel-test: $(INSTALLED)
	$(BIN)/python -m pytest -m slow tests/test_wheel.py

check: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pre-commit run --all-files

# Kills runs and feeds damaged input, hours on two cores; started again it continues. Fewer of them:
# make faults FAULTS="--kills 20 --inputs 1000 --seed 1".
FAULTS ?= --kills 200 --inputs 10000 --jobs 2
faults: $(INSTALLED)
	$(BIN)/python -m tests.faults $(FAULTS)

# 20,000 steps of a tiny model: memory and the time of a step stay flat.
soak: $(INSTALLED)
	$(BIN)/python -m tests.faults.soak

# Whether anything installed has a known vulnerability; asks the network. A package that the network
# does not know is an error; of 2.0+cpu it knows 2.0.
audit: $(INSTALLED)
	$(BIN)/python -m venv .venv/audit
	.venv/audit/bin/python -m pip install -q pip-audit
	$(BIN)/python -m pip list --format freeze --exclude-editable | sed 's/+.*//' > .venv/audit/installed.txt
	.venv/audit/bin/pip-audit --strict --no-deps --disable-pip -r .venv/audit/installed.txt

# A site of README and the guides in build/site; a dead link is an error.
docs: $(INSTALLED)
	$(BIN)/python scripts/api_page.py
	$(BIN)/python -m sphinx -W --keep-going -q -c docs . build/site
	@echo "Open build/site/README.html"

size:
	@$(PYTHON) scripts/size.py

clean:
	rm -rf .venv

$(DEMO_INSTALLED): pyproject.toml constraints.txt requirements-demo.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "PYTHON: expected Python >= 3.11, got $$($(PYTHON) --version 2>&1)." \
			"Name another one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Installing into .venv; the first time this takes minutes, most of them for PyTorch."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[plots]'
	$(BIN)/python -m pip install --no-deps -r requirements-demo.txt
	@touch $@
	@echo "Installed."

$(INSTALLED): $(DEMO_INSTALLED)
	@echo "Installing the tools of tests and checks."
	$(BIN)/python -m pip install -c constraints.txt -e '.[plots,dev,docs]'
	@touch $@

$(QUANTIZED)/.installed: requirements-quantized.txt $(DEMO_INSTALLED)
	$(BIN)/python -m pip install --no-deps --upgrade --target $(QUANTIZED) -r $<
	@touch $@

$(ECOSYSTEM)/.installed $(UPSTREAM)/.installed: .venv/%/.installed: $(INSTALLED)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"
	$(@D)/bin/python -m pip install -c constraints.txt -e '.[$*]'
	@touch $@
