from eventsql_orchestration import *
from eventsql_orchestration.log.claims import Claim

def test_smoke(platform):
    platform.registry.register_topic(Topic("account_created", partitions=3)).register_topic(Topic("account_created_dlt"))
    platform.registry.register_consumer(Consumer("account_created", "mailer", partitioned=True), max_attempts=1)
    platform.publisher.publish(Publication("account_created", b"{}", key="42", metadata={"source": "web"}))
    assert platform.publisher.publish_all(Publication("account_created", b"%d" % i, key=str(i)) for i in range(1000)) == 1000
    assert platform.transfer.run_once() == {"account_created": 1001}
    assert platform.reader.count("account_created") == 1001
    seen = []
    n = platform.consumers.consume_once("account_created", "mailer", lambda es, c: seen.extend(es))
    assert n == 1001 and len(seen) == 1001
    assert all(l.events == 0 for l in platform.lag())
    platform.publisher.publish(Publication("account_created", b"bad", key="42"))
    platform.transfer.run_once()
    p = [l.partition for l in platform.lag() if l.events][0]
    c = platform.claims.claim("account_created", "mailer", p, owner="me")
    assert isinstance(c, Claim), c
    c = platform.claims.adopt(c.id, owner="run")
    def boom(events, conn): raise ValueError("no")
    r = platform.claims.process(c, boom)
    print(r)
    platform.transfer.run_once()
    print(platform.dead_letters.list("account_created"))
    assert platform.dead_letters.redrive("account_created") == 1
    print(platform.lag())
