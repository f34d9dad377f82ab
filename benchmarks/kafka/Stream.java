import java.io.BufferedInputStream;
import java.io.DataInputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * A topic of Kafka, its publisher or its consumer: the roles of `eventsql bench stream`. Each role is a process of its own.
 *
 * <p>The publisher waits until every event of a batch is acknowledged before it sends the next batch. The consumer commits
 * its offsets after each batch, and ends after so many events.
 */
final class Stream {
    private record Event(String key, byte[] value) {}

    private static final CountDownLatch GO = new CountDownLatch(1);

    /** Arguments: serve PROPERTIES, create SERVER TOPIC PARTITIONS FLUSH, publish SERVER TOPIC EVENTS BATCH FILE, consume SERVER TOPIC EVENTS BATCH. */
    public static void main(String[] arguments) throws Exception {
        if (!arguments[0].equals("create")) {
            listen();
        }
        if (arguments[0].equals("serve")) {
            // Only clients report.
            System.setOut(System.err);
            kafka.Kafka.main(new String[] {arguments[1]});
            return;
        }
        String server = arguments[1];
        String topic = arguments[2];
        int number = Integer.parseInt(arguments[3]);
        switch (arguments[0]) {
            case "create" -> create(server, topic, number, Boolean.parseBoolean(arguments[4]));
            case "publish" -> publish(server, topic, number, Integer.parseInt(arguments[4]), Path.of(arguments[5]));
            case "consume" -> consume(server, topic, number, Integer.parseInt(arguments[4]));
            default -> throw new IllegalArgumentException(arguments[0]);
        }
    }

    private static void create(String server, String topic, int partitions, boolean flush) throws Exception {
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", server))) {
            NewTopic created = new NewTopic(topic, partitions, (short) 1);
            // With a flush, the broker has each batch on disk before it acknowledges the batch, as PostgreSQL has a commit.
            created.configs(flush ? Map.of("flush.messages", "1") : Map.of());
            admin.createTopics(List.of(created)).all().get();
        }
    }

    private static void publish(String server, String topic, int events, int batch, Path file) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", server);
        settings.put("acks", "all");
        settings.put("linger.ms", "5");
        // Room for the events of a partition in a batch of 20,000: fewer, larger requests are Kafka's fastest way.
        settings.put("batch.size", "524288");
        settings.put("buffer.memory", "67108864");
        settings.put("max.request.size", "8388608");
        List<Event> pool = read(file);
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new ByteArraySerializer())) {
            producer.partitionsFor(topic);
            ready();
            long started = System.currentTimeMillis();
            List<Future<RecordMetadata>> sent = new ArrayList<>(batch);
            for (int number = 0; number < events; number++) {
                Event event = pool.get(number % pool.size());
                sent.add(producer.send(new ProducerRecord<>(topic, event.key(), event.value())));
                if (sent.size() == batch || number == events - 1) {
                    producer.flush();
                    for (Future<RecordMetadata> each : sent) {
                        each.get();
                    }
                    sent.clear();
                }
            }
            say(started, events);
        }
    }

    /** The events that the Python benchmark has written: each key and value behind its length. */
    private static List<Event> read(Path file) throws IOException {
        List<Event> pool = new ArrayList<>();
        try (var input = new DataInputStream(new BufferedInputStream(Files.newInputStream(file)))) {
            while (input.available() > 0) {
                String key = new String(input.readNBytes(input.readInt()), StandardCharsets.UTF_8);
                pool.add(new Event(key, input.readNBytes(input.readInt())));
            }
        }
        return pool;
    }

    private static void consume(String server, String topic, int events, int batch) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", server);
        settings.put("group.id", "bench");
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", "false");
        settings.put("max.poll.records", Integer.toString(batch));
        try (var consumer = new KafkaConsumer<>(settings, new StringDeserializer(), new ByteArrayDeserializer())) {
            consumer.subscribe(List.of(topic));
            while (consumer.assignment().isEmpty()) {
                consumer.poll(Duration.ofMillis(100));
            }
            ready();
            long started = System.currentTimeMillis();
            int consumed = 0;
            while (consumed < events) {
                ConsumerRecords<String, byte[]> records = consumer.poll(Duration.ofMillis(200));
                for (ConsumerRecord<String, byte[]> each : records) {
                    if (each.key().isEmpty() || each.value().length == 0) {
                        throw new IllegalStateException("an event without its content");
                    }
                    consumed++;
                }
                if (!records.isEmpty()) {
                    consumer.commitSync();
                }
            }
            say(started, consumed);
        }
    }

    /** Say that it is ready, and wait for the word to go. */
    private static void ready() throws InterruptedException {
        System.out.println("{\"ready\": true}");
        GO.await();
    }

    /** Take the word to go, and end this process when its input ends, as it does when the benchmark is killed. */
    private static void listen() {
        Thread listener = new Thread(() -> {
            try {
                while (System.in.read() >= 0) {
                    GO.countDown();
                }
            } catch (IOException ignored) {
                // The benchmark has ended.
            }
            Runtime.getRuntime().halt(1);
        });
        listener.setDaemon(true);
        listener.start();
    }

    /** Say when the events began and ended, and how many they are; wait for the end. In milliseconds, by the clock of the machine. */
    private static void say(long started, int events) throws InterruptedException {
        String outcome = "{\"outcome\": {\"started\": %d, \"ended\": %d, \"events\": %d}}";
        System.out.println(outcome.formatted(started, System.currentTimeMillis(), events));
        // The processor time of a process that has ended cannot be read.
        Thread.currentThread().join();
    }
}
