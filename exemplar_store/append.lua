-- KEYS: events, writers, fence. ARGV: writer, number of the event, event, token or ''.
-- Answers the entry's id, 0 when this event was appended before, or -1 under a stale token.
if ARGV[4] ~= '' and (redis.call('GET', KEYS[3]) or '0') ~= ARGV[4] then return -1 end
local last = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0')
if tonumber(ARGV[2]) <= last then return 0 end
local id = redis.call('XADD', KEYS[1], '*', 'event', ARGV[3])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return id
