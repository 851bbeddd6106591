"""ActiveMQ Classic with STOMP connectors, as a separate broker for the tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .certificates import PASSWORD as KEYSTORE_PASSWORD
from .root import Root
from .server import free_port
from .stomp_server import ALLOWED, LIMITED_USER, PASSWORD, USER, StompServer

#: A queue whose name begins so holds 40 KB and then parks what producers send.
CRAMPED = "cramped."

CONFIGURATION = """\
<beans xmlns="http://www.springframework.org/schema/beans"
       xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
       xsi:schemaLocation="http://www.springframework.org/schema/beans
           http://www.springframework.org/schema/beans/spring-beans.xsd
           http://activemq.apache.org/schema/core
           http://activemq.apache.org/schema/core/activemq-core.xsd">
  <broker xmlns="http://activemq.apache.org/schema/core" brokerName="txmsg"
          dataDirectory="{data}" schedulerSupport="true" useJmx="false">
    <destinationPolicy>
      <policyMap><policyEntries>
        <policyEntry queue=">">
          <deadLetterStrategy>
            <individualDeadLetterStrategy queuePrefix="DLQ."
                                          useQueueForQueueMessages="true"/>
          </deadLetterStrategy>
        </policyEntry>
        <!-- Full after some forty small messages: producers feel flow control. -->
        <policyEntry queue="{cramped}>" producerFlowControl="true"
                     memoryLimit="40kb">
          <pendingQueuePolicy><vmQueueCursor/></pendingQueuePolicy>
        </policyEntry>
      </policyEntries></policyMap>
    </destinationPolicy>
    <persistenceAdapter>
      <kahaDB directory="{data}/kahadb" journalDiskSyncStrategy="always"{journal}/>
    </persistenceAdapter>
    <plugins>
      <simpleAuthenticationPlugin>
        <users>
          <authenticationUser username="{user}" password="{password}" groups="users"/>
          <authenticationUser username="{limited}" password="{password}"
                              groups="limited"/>
        </users>
      </simpleAuthenticationPlugin>
      <authorizationPlugin>
        <map><authorizationMap><authorizationEntries>
          <authorizationEntry queue=">" read="users" write="users" admin="users"/>
          <authorizationEntry topic=">" read="users" write="users"
                              admin="users,limited"/>
          <authorizationEntry queue="{allowed}>" read="users,limited"
                              write="users,limited" admin="users,limited"/>
        </authorizationEntries></authorizationMap></map>
      </authorizationPlugin>
    </plugins>
    <sslContext>
      <sslContext keyStore="file:{keystore}" keyStoreType="PKCS12"
                  keyStorePassword="{keystore_password}"/>
    </sslContext>
    <systemUsage>
      <systemUsage{usage}>
        <!-- Without this limit a long queue takes the heap and the broker hangs. -->
        <memoryUsage><memoryUsage percentOfJvmHeap="60"/></memoryUsage>
        <storeUsage><storeUsage limit="{store}"/></storeUsage>
        <tempUsage><tempUsage limit="1 gb"/></tempUsage>
      </systemUsage>
    </systemUsage>
    <transportConnectors>
      <transportConnector name="stomp" uri="stomp://127.0.0.1:{port}"/>
      <transportConnector name="stomp+ssl" uri="stomp+ssl://127.0.0.1:{tls_port}"/>
      <transportConnector name="openwire" uri="tcp://127.0.0.1:{openwire_port}"/>
    </transportConnectors>
  </broker>
</beans>
"""

LOGGING = """\
log4j.rootLogger=WARN, console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d %-5p %m%n
"""


class ActiveMQ(StompServer):
    """One ActiveMQ Classic broker whose journal is synced to disk."""

    name = "activemq"
    debian_packages = "activemq openjdk-17-jre-headless openssl"
    #: How much its store holds; further settings of usage and journal.
    store, usage, journal = "8 gb", "", ""

    def __init__(self) -> None:
        super().__init__()
        self.openwire_port = free_port()

    @property
    def jms_url(self) -> str:
        """Return the URL for Java clients."""
        return f"tcp://127.0.0.1:{self.openwire_port}"

    @classmethod
    def programs(cls) -> dict[str, Path | None]:
        return {
            "activemq.jar": cls.root().find(f"{_home()}/bin/activemq.jar"),
            "java": cls.root().which("java"),
            "openssl": Root().which("openssl"),
        }

    def prepare(self) -> None:
        (self.directory / "conf").mkdir()
        (self.directory / "data").mkdir()
        (self.directory / "conf/log4j.properties").write_text(LOGGING)
        (self.directory / "conf/activemq.xml").write_text(
            CONFIGURATION.format(
                data=self.directory / "data",
                store=self.store,
                usage=self.usage,
                journal=self.journal,
                allowed=ALLOWED,
                cramped=CRAMPED,
                keystore=self.certificates.keystore,
                keystore_password=KEYSTORE_PASSWORD,
                password=PASSWORD,
                port=self.port,
                tls_port=self.tls_port,
                openwire_port=self.openwire_port,
                user=USER,
                limited=LIMITED_USER,
            )
        )

    def launch(self) -> subprocess.Popen[bytes]:
        here = self.directory
        return self.spawn(
            [
                "java",
                "-Xms256M",
                "-Xmx1G",
                # It lives for minutes: compiling well does not pay.
                "-XX:TieredStopAtLevel=1",
                "-XX:+UseSerialGC",
                f"-Djava.io.tmpdir={here}",
                f"-Dlog4j.configuration=file:{here}/conf/log4j.properties",
                f"-Dactivemq.home={_home()}",
                f"-Dactivemq.base={here}",
                f"-Dactivemq.conf={here}/conf",
                f"-Dactivemq.data={here}/data",
                "-jar",
                f"{_home()}/bin/activemq.jar",
                "start",
                f"xbean:file:{here}/conf/activemq.xml",
            ]
        )


class SmallActiveMQ(ActiveMQ):
    """A broker with a store of a few megabytes. The broker returns an error if its
    store or a `CRAMPED` queue is full."""

    store, usage = "6 mb", ' sendFailIfNoSpace="true"'
    journal = ' journalMaxFileLength="256kb" cleanupInterval="300"'


class SilentActiveMQ(SmallActiveMQ):
    """A broker that stops reading from its clients if its store is full."""

    usage = ""


def _home() -> Path:
    """Return the directory of ActiveMQ: `ACTIVEMQ_HOME` if it is set, otherwise that of
    Debian's package."""
    return Path(os.environ.get("ACTIVEMQ_HOME", "/usr/share/activemq"))
