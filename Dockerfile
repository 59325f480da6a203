# docker build --tag choria-provisioner .
# docker run --init --stop-timeout 45 --volume /etc/choria-provisioner:/etc/choria-provisioner:ro choria-provisioner
#
# --init: helpers may leave processes behind, which somebody has to reap. --stop-timeout: longer than shutdown_grace, or
# what is in work at the end is cut off. The helper runs in the container: one that
# needs more than sh and Python wants an image of its own, made from this one.
FROM python:3.13-slim AS build
WORKDIR /source
COPY pyproject.toml setup.cfg README.md LICENSE ./
COPY provisioner provisioner
RUN python -m venv --without-pip /opt/choria-provisioner \
    && pip --python /opt/choria-provisioner/bin/python install --no-cache-dir .

FROM python:3.13-slim
RUN useradd --system --home-dir /var/lib/choria-provisioner --create-home choria-provisioner
COPY --from=build /opt/choria-provisioner /opt/choria-provisioner
USER choria-provisioner
ENTRYPOINT ["/opt/choria-provisioner/bin/choria-provisioner"]
CMD ["run", "--config", "/etc/choria-provisioner/provisioner.yaml", "--choria-config", "/etc/choria-provisioner/choria.cfg"]
