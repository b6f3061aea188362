# The device image: the agent and what it shares with the controller, as the last thin layer.
ARG RUNTIME
FROM ${RUNTIME}
COPY code /opt/testbed/code
RUN python3 -m compileall -q /opt/testbed/code
# What a device saves; a volume of its own lies over it, so that it outlives a restart.
RUN mkdir /state && chown device /state
USER device
EXPOSE 8700 8701 8702/udp
CMD ["python3", "-m", "testbed_agent"]
