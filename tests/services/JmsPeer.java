import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.Collections;
import javax.jms.BytesMessage;
import javax.jms.Connection;
import javax.jms.Message;
import javax.jms.MessageConsumer;
import javax.jms.Queue;
import javax.jms.Session;
import javax.jms.TextMessage;
import org.apache.activemq.ActiveMQConnectionFactory;

/**
 * A real JMS client, as another team has one.
 *
 * <p>send QUEUE TEXT [NAME=VALUE ...] sends a TextMessage; receive QUEUE COUNT [SELECTOR] prints a
 * line for each message: its kind, its body, its properties. All text is Base64 of UTF-8.
 */
public class JmsPeer {
  public static void main(String[] args) throws Exception {
    ActiveMQConnectionFactory factory =
        new ActiveMQConnectionFactory(
            System.getenv("JMS_USER"), System.getenv("JMS_PASSWORD"), System.getenv("JMS_URL"));
    Connection connection = factory.createConnection();
    connection.start();
    Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
    Queue queue = session.createQueue(args[1]);
    if (args[0].equals("send")) {
      TextMessage message = session.createTextMessage(decoded(args[2]));
      for (int i = 3; i < args.length; i++) {
        int equals = args[i].indexOf('=');
        message.setStringProperty(
            args[i].substring(0, equals), decoded(args[i].substring(equals + 1)));
      }
      session.createProducer(queue).send(message);
    } else {
      String selector = args.length > 3 ? decoded(args[3]) : null;
      MessageConsumer consumer = session.createConsumer(queue, selector);
      for (int i = 0; i < Integer.parseInt(args[2]); i++) {
        Message message = consumer.receive(30000);
        if (message == null) {
          throw new IllegalStateException("nothing came");
        }
        System.out.println(told(message));
      }
    }
    connection.close();
  }

  private static String told(Message message) throws Exception {
    StringBuilder line = new StringBuilder();
    if (message instanceof TextMessage) {
      line.append("text ").append(encoded(((TextMessage) message).getText()));
    } else if (message instanceof BytesMessage) {
      BytesMessage bytes = (BytesMessage) message;
      byte[] body = new byte[(int) bytes.getBodyLength()];
      bytes.readBytes(body);
      line.append("bytes ").append(Base64.getEncoder().encodeToString(body));
    } else {
      line.append("other -");
    }
    for (Object name : Collections.list(message.getPropertyNames())) {
      String value = String.valueOf(message.getObjectProperty((String) name));
      line.append(' ').append(name).append('=').append(encoded(value));
    }
    return line.append(" JMSCorrelationID=")
        .append(encoded(String.valueOf(message.getJMSCorrelationID())))
        .toString();
  }

  private static String encoded(String text) {
    return Base64.getEncoder().encodeToString(text.getBytes(StandardCharsets.UTF_8));
  }

  private static String decoded(String text) {
    return new String(Base64.getDecoder().decode(text), StandardCharsets.UTF_8);
  }
}
