# The example project. The database is a file on the volume:
#   docker build -t txmsg-example .
#   docker run --rm -v txmsg:/data txmsg-example migrate
#   docker run --rm -v txmsg:/data -p 8000:8000 txmsg-example
#   docker run --rm -v txmsg:/data txmsg-example txmsg run
# -e DATABASE_URL=postgres://… and -e TXMSG_BROKER_URL=amqp://… use servers instead.
FROM python:3.14-slim
WORKDIR /srv
COPY pyproject.toml README.md LICENSE ./
COPY django_txmsg ./django_txmsg
RUN pip install --no-cache-dir ".[example,postgres,amqp,stomp,typed]"
COPY example_project ./example_project
RUN useradd --system txmsg && install -d -o txmsg /data
USER txmsg
VOLUME /data
ENV DATABASE_URL=sqlite:////data/shop.sqlite3 PYTHONUNBUFFERED=1
EXPOSE 8000
ENTRYPOINT ["python", "example_project/manage.py"]
CMD ["runserver", "--noreload", "0.0.0.0:8000"]
