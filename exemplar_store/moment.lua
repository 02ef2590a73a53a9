-- requires place.lua
-- KEYS: exemplars, scores, stats, pins, islands. Answers all indexes of a shelf as they are at one moment: the task's
-- counts; ids, each with 'seq|bucket|micro-score' or '' where its entry has none; ids, each with its score; the task's
-- pins; ids on islands.
local keys = shelf_keys(1)
local filed = {}
for _, id in ipairs(redis.call('HKEYS', keys.exemplars)) do
  local seq, bucket, micro = parse(redis.call('HGET', keys.exemplars, id))
  filed[#filed + 1] = id
  filed[#filed + 1] = seq and string.format('%d|%s|%s', seq, bucket, micro) or ''
end
return {
  redis.call('HGETALL', keys.stats), filed, redis.call('ZRANGE', keys.scores, 0, -1, 'WITHSCORES'),
  redis.call('HGETALL', keys.pins), redis.call('HKEYS', keys.islands),
}
