# The agent alone, to be put into an image of the user's: program.Dockerfile copies all of it into one folder there.
ARG RUNTIME
FROM ${RUNTIME}
COPY code /opt/testbed/code
# What the agent is started with, by names that do not depend on the machine's kind or on where Python came from.
RUN python3 -m compileall -q /opt/testbed/code && mkdir /state && chown device /state \
    && ln -s ".$(dirname "$(readlink -f /lib/*-linux-gnu*/libc.so.6)")" /libraries && cp -L /libraries/ld-linux*.so.? /loader \
    && ln -s ".$(readlink -f "$(command -v python3)")" /python
