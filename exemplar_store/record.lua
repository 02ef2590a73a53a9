-- requires place.lua
-- A sample leaves its group, once: the group's state, the ledger, the evaluation, the exemplar and the outbox together.
-- KEYS: group, done, outbox, ledger, evaluations, exemplars, scores, stats, pins, islands, best
-- ARGV: group id, sample id, index, outcome, packed scored sample, evaluation field or '', packed evaluation,
--       then nothing, or the arguments of `place`, the run, and the lower end of the exemplar's interval
-- Answers status, left, size, new exemplar, its bucket.
-- Status: 1 recorded, 0 recorded before, -1 no such group, -2 index beyond the group's size.
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return {0, 0, 0, 0, ''} end
local state = redis.call('HMGET', KEYS[1], 'size', 'left', 'island')
if not state[1] then return {-1, 0, 0, 0, ''} end
local size, left = tonumber(state[1]), tonumber(state[2])
if tonumber(ARGV[3]) >= size then return {-2, left, size, 0, ''} end
if redis.call('HSETNX', KEYS[1], 's:' .. ARGV[2], ARGV[5]) == 0 then return {0, left, size, 0, ''} end
left = redis.call('HINCRBY', KEYS[1], 'left', 1)
redis.call('HINCRBY', KEYS[4], ARGV[4], 1)
if ARGV[6] ~= '' then redis.call('HSET', KEYS[5], ARGV[6], ARGV[7]) end
local new, bucket = 0, ''
if #ARGV > 7 then
  local shelf, id = string.match(ARGV[8], '^(%S+) (%S+)')
  hold_best(shelf_keys(6), KEYS[11], ARGV[10], shelf, id, ARGV[11])  -- first, so that no cap takes it away
  new, bucket = place(shelf_keys(6), ARGV[8], ARGV[9], state[3] or '')
end
if left == size then redis.call('SADD', KEYS[3], ARGV[1]) end
return {1, left, size, new, bucket}
