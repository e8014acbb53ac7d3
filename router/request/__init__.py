"""One inference request, from its first byte to its last.

The stages, in order. Each takes the result of the one before, and returns its own:

    read          InferenceRequestReader.read      -> ParsedRequest
    authenticate  InferenceHandler._authenticate   -> Caller; before the body is parsed
    resolve       stages.resolve_target            -> RequestTarget: base model and adapter
    authorise     stages.resolve_target            an adapter that the caller may not use is unknown to it
    tokenize      stages.tokenize                  -> Tokens: ids, or an approximation
    hash          stages.hash_prompt               -> HashedRequest
    match         stages.match                     -> PrefixMatch: cached blocks of each replica
    decide        stages.dispatch                  -> DispatchedRequest: at a replica, at once or from the queue
    open          EngineAttempt.open               the attempt, until its first event decides it
    relay         ClientResponse._relay            the stream to the client; a whole answer is sent at once
    record        accounting.record                load, quota, circuits, poison books, trace, traffic

The eight classes of a request and their lives:

    HttpExchange       |=========================================|  one request on a client's connection
      ParsedRequest      |=======================================|  what the client asks for
      RequestRun         |=======================================|  drives the stages; attempts and failures
        RoutingRequest       |===================================|  what the scheduler may know of it
          HashedRequest      |===|                                  with its prompt's block hashes
          QueuedRequest        |=|                                  waits for an engine
          DispatchedRequest      |===============================|  the record of it at one replica, counted there once
            EngineAttempt          |=============================|  one HTTP exchange with one engine

An attempt that fails ends with its DispatchedRequest, and RequestRun begins with a HashedRequest again, see
`router.core.failover.verdict`. Where a stage must wait, the request's coroutine leaves its batch for a task, see
`lorafleet.http_server.batches`.

May import every package but `items`, `api` and `app`.
"""
