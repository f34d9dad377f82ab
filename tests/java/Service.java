import com.binaryigor.eventsql.ConsumerDefinition;
import com.binaryigor.eventsql.Event;
import com.binaryigor.eventsql.EventPublication;
import com.binaryigor.eventsql.EventSQL;
import com.binaryigor.eventsql.EventSQLConsumers;
import com.binaryigor.eventsql.EventSQLDialect;
import com.binaryigor.eventsql.TopicDefinition;
import com.zaxxer.hikari.HikariConfig;
import com.zaxxer.hikari.HikariDataSource;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;

/**
 * A Java service on EventSQL that does what it is told, a line for each: texts are in Base64, "-" is none. It answers
 * "done" or "error MESSAGE", and says "event …" for each event that a consumer of it is handed.
 */
public class Service {

    private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);

    private final EventSQL eventSQL;

    Service(String url, String user, String password) {
        var config = new HikariConfig();
        config.setJdbcUrl(url);
        config.setUsername(user);
        config.setPassword(password);
        config.setMaximumPoolSize(8);
        eventSQL = new EventSQL(new HikariDataSource(config), EventSQLDialect.POSTGRES);
    }

    public static void main(String[] arguments) throws Exception {
        var service = new Service(arguments[0], arguments[1], System.getenv("PGPASSWORD"));
        say("done");
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (var line = lines.readLine(); line != null; line = lines.readLine()) {
            try {
                service.obey(line.split(" "));
                say("done");
            } catch (Exception e) {
                say("error " + encoded(e.getClass().getSimpleName() + ": " + e.getMessage()));
            }
        }
        System.exit(0);
    }

    private void obey(String[] words) {
        switch (words[0]) {
            case "topic" -> eventSQL.registry().registerTopic(new TopicDefinition(words[1], Integer.parseInt(words[2])));
            case "consumer" -> eventSQL.registry()
                    .registerConsumer(new ConsumerDefinition(words[1], words[2], Boolean.parseBoolean(words[3])));
            case "unregister" -> {
                if (words.length == 2) {
                    eventSQL.registry().unregisterTopic(words[1]);
                } else {
                    eventSQL.registry().unregisterConsumer(words[1], words[2]);
                }
            }
            case "publish" -> publish(words[1], Arrays.asList(words).subList(2, words.length));
            case "start" -> start(words[1], words[2], Integer.parseInt(words[3]), text(words[4]));
            case "stop" -> {
                eventSQL.consumers().stop(Duration.ofSeconds(30));
                eventSQL.publisher().stop(Duration.ofSeconds(30));
            }
            default -> throw new IllegalArgumentException(words[0]);
        }
    }

    private void publish(String topic, List<String> events) {
        var publications = new ArrayList<EventPublication>();
        for (var event : events) {
            var fields = event.split(":");
            publications.add(new EventPublication(topic, text(fields[0]), decoded(fields[1]), metadata(fields[2])));
        }
        eventSQL.publisher().publishAll(publications);
    }

    private void start(String topic, String consumer, int most, String poison) {
        if (poison == null) {
            eventSQL.consumers().startBatchConsumer(topic, consumer, events -> events.forEach(Service::tell),
                    EventSQLConsumers.ConsumptionConfig.of(1, most, Duration.ofMillis(20), Duration.ofMillis(20)));
        } else {
            eventSQL.consumers().startConsumer(topic, consumer, event -> {
                if (new String(event.value(), StandardCharsets.UTF_8).equals(poison)) {
                    throw new IllegalStateException("not today");
                }
                tell(event);
            }, Duration.ofMillis(20));
        }
    }

    private static void tell(Event event) {
        say("event %s %d %d %s %s %s".formatted(event.topic(), event.partition(), event.id(),
                event.key() == null ? "-" : encoded(event.key()), encoded(event.value()),
                event.metadata().isEmpty() ? "-" : event.metadata().entrySet().stream()
                        .map(e -> encoded(e.getKey()) + "=" + encoded(e.getValue())).collect(Collectors.joining(","))));
    }

    private static synchronized void say(String line) {
        OUT.println(line);
    }

    private static String encoded(String text) {
        return encoded(text.getBytes(StandardCharsets.UTF_8));
    }

    /** Begins with a dot, so that an empty text is a word too. */
    private static String encoded(byte[] bytes) {
        return "." + Base64.getUrlEncoder().withoutPadding().encodeToString(bytes);
    }

    private static String text(String word) {
        return word.equals("-") ? null : new String(decoded(word), StandardCharsets.UTF_8);
    }

    private static byte[] decoded(String word) {
        return Base64.getUrlDecoder().decode(word.substring(1));
    }

    private static Map<String, String> metadata(String word) {
        var metadata = new LinkedHashMap<String, String>();
        if (!word.equals("-")) {
            for (var pair : word.split(",")) {
                var sides = pair.split("=");
                metadata.put(text(sides[0]), text(sides[1]));
            }
        }
        return metadata;
    }
}
