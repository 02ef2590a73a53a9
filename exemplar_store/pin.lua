-- requires place.lua
-- KEYS: exemplars, scores, stats, pins, islands. ARGV: owner, shelf, exemplar id.
-- Answers 1 pinned, 0 pinned before, -1 no such exemplar.
if redis.call('HEXISTS', KEYS[1], ARGV[3]) == 0 then return -1 end
return hold(shelf_keys(1), ARGV[1], ARGV[2], ARGV[3])
