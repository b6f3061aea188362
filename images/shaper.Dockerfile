# The shaper image: the program that shapes the devices' links from within their network namespaces.
ARG RUNTIME
FROM ${RUNTIME}
COPY code /opt/testbed/code
RUN python3 -m compileall -q /opt/testbed/code
EXPOSE 8700
CMD ["python3", "-m", "testbed_controller.shaping"]
