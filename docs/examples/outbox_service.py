"""A service whose orders and events are one transaction, with each driver: `uvicorn outbox_service:app`.

Each way writes the order and runs the statement of its event on the same connection. A real service needs one of them.
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import asyncpg
import psycopg
import psycopg2
from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from eventsql_orchestration import EventSQL, Publication, Topic

URL = os.environ["EVENTSQL_DSN"]
SHOP_ORDER = "INSERT INTO shop_order (id, item) VALUES"

platform = EventSQL(URL)
engine = create_async_engine(URL.replace("postgresql://", "postgresql+psycopg://"))


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    platform.registry.register_topic(Topic("order_placed", partitions=4))
    with psycopg.connect(URL) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS shop_order (id bigint PRIMARY KEY, item text NOT NULL)")
    yield
    await engine.dispose()
    platform.close()


app = FastAPI(lifespan=lifespan)


def placed(order: int, item: str) -> Publication:
    return Publication("order_placed", json.dumps({"order": order, "item": item}).encode(), key=str(order))


@app.post("/psycopg/{order}")
async def with_psycopg(order: int, item: str) -> None:
    event = platform.publisher.statement(placed(order, item))
    async with await psycopg.AsyncConnection.connect(URL) as connection:
        await connection.execute(f"{SHOP_ORDER} (%s, %s)", (order, item))
        await connection.execute(event.sql, event.parameters)


@app.post("/sqlalchemy_connection/{order}")
async def with_sqlalchemy_connection(order: int, item: str) -> None:
    event = platform.publisher.statement(placed(order, item), paramstyle="named")
    async with engine.begin() as connection:
        await connection.execute(text(f"{SHOP_ORDER} (:id, :item)"), {"id": order, "item": item})
        await connection.execute(text(event.sql), event.parameters)


@app.post("/sqlalchemy_session/{order}")
async def with_sqlalchemy_session(order: int, item: str) -> None:
    event = platform.publisher.statement(placed(order, item), paramstyle="named")
    async with AsyncSession(engine) as session, session.begin():
        await session.execute(text(f"{SHOP_ORDER} (:id, :item)"), {"id": order, "item": item})
        await session.execute(text(event.sql), event.parameters)


@app.post("/asyncpg/{order}")
async def with_asyncpg(order: int, item: str) -> None:
    event = platform.publisher.statement(placed(order, item), paramstyle="numeric_dollar")
    connection = await asyncpg.connect(URL)
    try:
        async with connection.transaction():
            await connection.execute(f"{SHOP_ORDER} ($1, $2)", order, item)
            await connection.execute(event.sql, *event.parameters)
    finally:
        await connection.close()


@app.post("/psycopg2/{order}")
def with_psycopg2(order: int, item: str) -> None:
    event = platform.publisher.statement(placed(order, item))
    with closing(psycopg2.connect(URL)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(f"{SHOP_ORDER} (%s, %s)", (order, item))
        cursor.execute(event.sql, event.parameters)
