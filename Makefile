# Everything a fresh machine needs: `make demo` and `make test` set up their own virtual environment.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name) 2>/dev/null)))
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo test check lint types docs lock fresh dist sbom licences bench mutations trust audit clean

# As tested: locks/ has versions and hashes, constraints.txt the version of torch, whose files differ between machines.
.venv/installed: pyproject.toml constraints.txt locks/base.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --no-deps --require-hashes -r locks/base.txt
	$(INSTALL) -c constraints.txt torch
	$(INSTALL) --no-deps --no-build-isolation -e .
	touch $@

.venv/installed-dev: .venv/installed locks/deploy.txt locks/dev.txt
	$(INSTALL) --no-deps --require-hashes -r locks/dev.txt
	touch $@

.venv/installed-check: .venv/installed-dev locks/check.txt
	$(INSTALL) --no-deps --require-hashes -r locks/check.txt
	touch $@

demo: .venv/installed  ## FedAvg forgets, ReSCENE does not; the last line says where the report lies
	$(BIN)/rescene demo

test: .venv/installed-dev  ## the whole suite, two workers with one thread each
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m "not slow" --doctest-modules src/rescene tests

check: .venv/installed-check lint types  ## everything: format, lint (also of workflows and container files), types, slow tests
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --doctest-modules src/rescene tests

lint: .venv/installed-check
	$(BIN)/ruff format --check src tests benchmarks docs examples locks release
	$(BIN)/ruff check src tests benchmarks docs examples locks release
	$(BIN)/python release/lint.py
	$(BIN)/python release/check_version.py

types: .venv/installed-dev
	$(BIN)/mypy

docs: .venv/installed-dev  ## the site, at docs/_build/html/index.html; the build fetches nothing and takes no warning
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build/html

lock: .venv/installed-dev  ## the newest releases that pyproject.toml allows, into locks/; needs a package index
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python locks/lock.py

fresh:  ## the wheel with base alone and with each extra, in new environments: locked, newest, oldest releases; needs a package index
	$(PYTHON) benchmarks/fresh.py $(ONLY)

dist: .venv/installed-dev  ## wheel, sdist and bill of materials in dist/; `make fresh` says whether the wheel works on a bare machine
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(MAKE) sbom

sbom: .venv/installed-dev  ## what a user installs, for machines: dist/rescene.cdx.json (CycloneDX)
	mkdir -p dist
	$(BIN)/python release/dependencies.py sbom dist/rescene.cdx.json

licences: .venv/installed-dev  ## the same for people: release/licences.md
	$(BIN)/python release/dependencies.py licences

bench: .venv/installed  ## ratios measured in one run on this machine, written to results/bench/
	$(BIN)/python benchmarks/bench.py

mutations: .venv/installed-dev  ## seeded bugs, each of which a test must catch
	$(BIN)/python tests/mutations.py

trust: .venv/installed-dev  ## what is promised about crashes and disks, checked: one table; `make trust FULL=--full` for a night
	$(ONE_THREAD) $(BIN)/python benchmarks/trust.py $(FULL)

audit: .venv/installed-dev  ## known vulnerabilities of what locks/ names; needs a network
	$(INSTALL) pip-audit
	@$(BIN)/pip-audit --strict --disable-pip --require-hashes $(addprefix -r locks/,base.txt deploy.txt dev.txt check.txt all.txt) || { echo "FAILED: the lines above name a vulnerability, or say that it could not be looked up (offline nothing is audited)"; exit 1; }

clean:
	rm -rf .venv build dist runs docs/_build docs/generated
