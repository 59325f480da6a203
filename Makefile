# Every target shares one environment, .venv, which is made on first use and again when setup.cfg changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test interop faults soak lint types format bench install uninstall deb rpm clean

# NETWORK: insecure, x509 or org
NETWORK ?= insecure
demo: $(READY)
	$(BIN)/python -m provisioner demo --network $(NETWORK)

test: lint types
	$(BIN)/python -m pytest -n 4 $(PYTEST_ARGS)

# Against the real Choria broker and servers, which are built with Go: the first time takes minutes.
interop: $(READY)
	$(BIN)/python -m pytest tests/interop $(PYTEST_ARGS)

# Everything that may go wrong, at full scale; `make test` has the same at a small one.
faults: $(READY)
	$(BIN)/python -m pytest tests/faults --full $(PYTEST_ARGS)

# MINUTES: how long servers arrive; SOAK_ARGS: --seed N --rate N --daemons 1|2
MINUTES ?= 60
OUT ?= build/soak
soak: $(READY)
	$(BIN)/python -m bench.soak --minutes $(MINUTES) --out $(OUT) $(SOAK_ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Prints Markdown tables, in ten minutes; the machine should have nothing else to do.
bench: $(READY)
	$(BIN)/python -m bench.bench_connector
	$(BIN)/python -m bench.bench_helper
	$(BIN)/python -m bench.bench_flow --picture docs/pictures/scaling.svg
	$(BIN)/python -m bench.bench_scale

# --- Installation

NAME := choria-provisioner
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' provisioner/__init__.py)
# for packagers: a folder that stands before all paths
DESTDIR ?=
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
ZSHDIR ?= $(PREFIX)/share/zsh/site-functions
# the Python that the installed program is to run with
RUNTIME ?= $(PYTHON)
# the time that built files get
install deb rpm: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || date +%s)

TO := $(abspath $(DESTDIR))
ifeq ($(DESTDIR),)
TO :=
endif
# a virtual environment of its own: not all of its libraries are in distributions
LIBRARY := $(PREFIX)/lib/$(NAME)
SHARE := $(PREFIX)/share
CONFIG := $(SYSCONFDIR)/$(NAME)
UNIT := $(PREFIX)/lib/systemd/system/$(NAME).service
COMPLETIONS = $(SHARE)/bash-completion/completions/$(NAME) $(ZSHDIR)/_$(NAME) $(SHARE)/fish/vendor_completions.d/$(NAME).fish
MANUAL := $(SHARE)/man/man8/$(NAME).8

install: $(READY)
	rm -rf $(TO)$(LIBRARY) build/lib build/bdist.* build/generated
	$(RUNTIME) -m venv --without-pip $(TO)$(LIBRARY)
	$(BIN)/pip --python $(TO)$(LIBRARY)/bin/python install --quiet --disable-pip-version-check --no-compile .
	mkdir -p build/generated && $(TO)$(LIBRARY)/bin/python etc/generate.py build/generated
# nothing in it may name the place where it was made, or do more than run the program
	rm -rf $(TO)$(LIBRARY)/include
	find $(TO)$(LIBRARY)/bin -type f -delete
	find $(TO)$(LIBRARY) -name direct_url.json -delete
# of setuptools; it costs every helper in Python two milliseconds
	find $(TO)$(LIBRARY) -name distutils-precedence.pth -delete
	sed -i '/^command = /d' $(TO)$(LIBRARY)/pyvenv.cfg
	sed 's|^#!.*|#!$(LIBRARY)/bin/python3 -I|' etc/launcher.py >$(TO)$(LIBRARY)/bin/$(NAME)
	chmod -R u=rwX,go=rX $(TO)$(LIBRARY) && chmod 0755 $(TO)$(LIBRARY)/bin/$(NAME)
	$(TO)$(LIBRARY)/bin/python -m compileall -q -s "$(TO)" --invalidation-mode unchecked-hash $(TO)$(LIBRARY)/lib
	install -d $(TO)$(PREFIX)/bin && ln -sfn ../lib/$(NAME)/bin/$(NAME) $(TO)$(PREFIX)/bin/
	sed 's|=/usr/bin/$(NAME)|=$(PREFIX)/bin/$(NAME)|' etc/systemd/$(NAME).service >build/generated/unit
	sed 's|=/usr/bin/$(NAME)|=$(PREFIX)/bin/$(NAME)|' etc/init.d/$(NAME) >build/generated/init
	install -D -m 0644 build/generated/unit $(TO)$(UNIT)
	install -D -m 0755 build/generated/init $(TO)$(SYSCONFDIR)/init.d/$(NAME)
	install -D -m 0644 etc/logrotate.d/$(NAME) $(TO)$(SYSCONFDIR)/logrotate.d/$(NAME)
	install -D -m 0644 build/generated/$(NAME).8 $(TO)$(MANUAL)
	install -D -m 0644 build/generated/$(NAME) $(TO)$(SHARE)/bash-completion/completions/$(NAME)
	install -D -m 0644 build/generated/_$(NAME) $(TO)$(ZSHDIR)/_$(NAME)
	install -D -m 0644 build/generated/$(NAME).fish $(TO)$(SHARE)/fish/vendor_completions.d/$(NAME).fish
	install -d $(TO)$(SHARE)/$(NAME) $(TO)$(SHARE)/doc/$(NAME) $(TO)$(CONFIG)
	cp -R etc/helpers etc/prometheus $(TO)$(SHARE)/$(NAME)/
	sed -i '1s|^#!/usr/lib/$(NAME)/|#!$(LIBRARY)/|' $(TO)$(SHARE)/$(NAME)/helpers/*.py
	cp -R README.md CHANGELOG.md LICENSE docs $(TO)$(SHARE)/doc/$(NAME)/
# the site's own files stay; secrets are in them
	for file in provisioner.yaml choria.cfg; do \
	    test -e $(TO)$(CONFIG)/$$file || install -m 0640 etc/$$file $(TO)$(CONFIG)/ || exit; \
	done
	if test -z "$(TO)" && getent group $(NAME) >/dev/null; then \
	    chgrp $(NAME) $(CONFIG)/provisioner.yaml $(CONFIG)/choria.cfg; \
	fi

# All but the configuration.
uninstall:
	rm -rf $(TO)$(LIBRARY) $(TO)$(SHARE)/$(NAME) $(TO)$(SHARE)/doc/$(NAME)
	rm -f $(TO)$(PREFIX)/bin/$(NAME) $(TO)$(UNIT) $(TO)$(SYSCONFDIR)/init.d/$(NAME) $(TO)$(SYSCONFDIR)/logrotate.d/$(NAME)
	rm -f $(addprefix $(TO),$(MANUAL) $(COMPLETIONS))

# Packages for the distribution's own Python in this very version, built on what they are for.
SYSTEM_PYTHON ?= $(realpath /usr/bin/python3)
MAINTAINER ?= $(NAME) <root@localhost>
WORK ?= build/packages
DIST ?= dist
STAGE := $(abspath $(WORK))/stage

.PHONY: stage
stage:
	rm -rf $(WORK)
	$(MAKE) install DESTDIR=$(STAGE) PREFIX=/usr RUNTIME=$(SYSTEM_PYTHON)

deb: stage
	etc/deb/build $(STAGE) $(WORK)/deb $(DIST) $(VERSION) $(notdir $(SYSTEM_PYTHON)) "$(MAINTAINER)"

rpm: stage
	rpmbuild -bb --quiet --define "_topdir $(abspath $(WORK))/rpm" --define "_rpmdir $(abspath $(DIST))" \
	    --define "stage $(STAGE)" --define "release_version $(VERSION)" --define "runtime $(SYSTEM_PYTHON)" \
	    etc/rpm/$(NAME).spec

# --- The environment

$(READY): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[demo,test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
