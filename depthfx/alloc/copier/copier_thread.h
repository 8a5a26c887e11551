/* The thread: issues chunks where there is room, else waits for the oldest batch, else for work.
 *
 * How much may be under way follows the link: halved when a batch takes SLOW times as long as the link needs by itself, for then somebody
 * else uses it, and one chunk more otherwise, up to `most`. One chunk at a time lets everybody in, for the queue runs empty behind it. A copy
 * of another stream that the engine does not serve beside this one's slows nothing, so the queue also runs empty after every RUN batches. */
#ifndef DEPTHFX_COPIER_THREAD_H
#define DEPTHFX_COPIER_THREAD_H

#include "copier_state.h"

#define SLOW 1.5     /* beside decode it is 1.1, where somebody else has half of the link it is 2 */
#define FORGET 1.001 /* a batch: a link that stays slow is the link after some 400 batches (6 GiB) */
#define RUN 32       /* batches of 16 MiB: 10 ms at most for who waits; 0.05 ms without a copy then are 0.5 % */

static void die(Copier* copier, const char* why) {
    pthread_mutex_lock(&copier->lock);
    copier->died = 1;
    snprintf(copier->why, WHY, "%s", why);
    for (Job* job = copier->jobs; job != NULL; job = job->next) fail_job(job, why);
    settle_all(copier);
    pthread_mutex_unlock(&copier->lock);
}

/* Runs the hook of a place; what fails there fails `job`, which must be held by the caller, or be NULL for the next one. */
static void pass(Copier* copier, int place, Job* job) {
    char why[WHY];
    int result = hook(&copier->hooks, place, why, sizeof why);
    if (result == HOOK_ENDS) die(copier, why);
    if (result != HOOK_FAILED) return;
    pthread_mutex_lock(&copier->lock);
    if (job == NULL) job = next_job(copier);
    if (job != NULL) fail_job(job, why);
    settle_all(copier);
    pthread_mutex_unlock(&copier->lock);
}

/* Takes the next chunks of the waiting jobs, at most half of what may be under way; the caller holds the lock. */
static Batch* gather(Copier* copier) {
    Batch* batch = copier->batches + (copier->issued + 1) % (uint64_t)copier->most;
    int half = (copier->flight + 1) / 2;
    batch->num_pieces = batch->num_chunks = batch->has_event = batch->follows = 0;
    for (Job* job; batch->num_chunks < half && (job = next_job(copier)) != NULL;) {
        size_t room = (size_t)(half - batch->num_chunks), left = job->bytes - job->issued;
        size_t chunks = (left - 1) / job->chunk + 1;
        size_t taken = chunks <= room ? left : room * job->chunk;
        batch->pieces[batch->num_pieces++] = (Piece){job, job->issued, job->issued + taken};
        batch->num_chunks += (int)(chunks <= room ? chunks : room);
        job->issued += taken;
        job->in_hand = 1;
        job->holds++;
    }
    copier->issuing = batch->num_pieces > 0;
    return batch->num_pieces ? batch : NULL;
}

static void fail_now(Copier* copier, Job* job, const char* why) {
    pthread_mutex_lock(&copier->lock);
    fail_job(job, why);
    pthread_mutex_unlock(&copier->lock);
}

static int copy(Copier* copier, char* target, const char* source, size_t size, char* why) {
    const CudaDriver* driver = &copier->driver;
    if (!copier->queues) {
        memcpy(target, source, size);
        return 0;
    }
    return check(driver, driver->copy((CUdeviceptr)(uintptr_t)target, source, size, copier->stream), "cuMemcpyHtoDAsync", why);
}

/* Chunk by chunk, so that a cancel waits for the one that is being handed over and no longer. */
static void hand_over(Copier* copier, Piece* piece) {
    Job* job = piece->job;
    char why[WHY];
    size_t end = piece->end;
    piece->end = piece->first;
    if (piece->first == 0 && job->after != NULL && !job->cancelled &&
        check(&copier->driver, copier->driver.stream_wait(copier->stream, job->after, 0), "cuStreamWaitEvent", why)) {
        fail_now(copier, job, why);
        return;
    }
    while (piece->end < end && !job->cancelled) {
        size_t size = end - piece->end < job->chunk ? end - piece->end : job->chunk;
        if (copy(copier, job->target + piece->end, job->source + piece->end, size, why)) {
            fail_now(copier, job, why);
            return;
        }
        piece->end += size;
    }
}

/* The event behind a batch. Without one nobody could wait for the chunks, so they end before anybody hears of the failure. */
static void record(Copier* copier, Batch* batch) {
    char why[WHY];
    if (!copier->queues) return;
    batch->has_event = !check(&copier->driver, copier->driver.event_record(batch->event, copier->stream), "cuEventRecord", why);
    if (batch->has_event) return;
    copier->driver.stream_synchronize(copier->stream);
    for (int i = 0; i < batch->num_pieces; i++) fail_now(copier, batch->pieces[i].job, why);
}

/* Whether the event of the batch before and that of this one will be its own time apart. With fewer slots an event might be used anew. */
static int follows(Copier* copier, const Batch* batch) {
    const Batch* before = copier->batches + copier->issued % (uint64_t)copier->most;
    if (!copier->queues || copier->most < 3 || copier->issued == copier->landed || !before->has_event) return 0;
    for (int i = 0; i < batch->num_pieces; i++)
        if (batch->pieces[i].first == 0 && batch->pieces[i].job->after != NULL) return 0;
    return copier->driver.event_query(before->event) == NOT_READY;
}

/* Nanoseconds a byte of a batch that has landed; 0: not known, as of less than a chunk. The driver tells of its failures elsewhere. */
static double time_of(const Copier* copier, const Batch* batch) {
    const Batch* before = copier->batches + copier->landed % (uint64_t)copier->most;
    size_t bytes = 0;
    float ms = 0;
    for (int i = 0; i < batch->num_pieces; i++) bytes += batch->pieces[i].end - batch->pieces[i].first;
    if (!batch->follows || bytes == 0 || bytes < batch->pieces[0].job->chunk) return 0;
    return copier->driver.event_elapsed(&ms, before->event, batch->event) == CUDA_SUCCESS ? ms * 1e6 / (double)bytes : 0;
}

/* The next change waits for batches that were issued after this one. The caller holds the lock. */
static void adapt(Copier* copier, double ns) {
    if (ns > 0) copier->best = copier->best == 0 || ns < copier->best ? ns : copier->best * FORGET;
    if (copier->landed <= copier->decided) return;
    int slow = ns > SLOW * copier->best, flight = slow ? (copier->flight + 1) / 2 : copier->flight + 1;
    copier->num_slow += slow;
    copier->flight = flight < copier->most ? flight : copier->most;
    copier->decided = copier->issued;
}

static void issue(Copier* copier) {
    pass(copier, BEFORE_CHUNK, NULL);
    pthread_mutex_lock(&copier->lock);
    Batch* batch = copier->died ? NULL : gather(copier);
    pthread_mutex_unlock(&copier->lock);
    if (batch == NULL) return; /* cancelled or failed meanwhile */
    batch->follows = follows(copier, batch);
    for (int i = 0; i < batch->num_pieces; i++) hand_over(copier, batch->pieces + i);
    record(copier, batch);
    pthread_mutex_lock(&copier->lock);
    copier->issuing = 0;
    copier->issued++;
    copier->run++;
    copier->num_flying += batch->num_chunks;
    for (int i = 0; i < batch->num_pieces; i++) {
        Piece piece = batch->pieces[i];
        piece.job->in_hand = 0;
        if (piece.end > piece.first) piece.job->batch = copier->issued;
    }
    pthread_cond_broadcast(&copier->changed);
    pthread_mutex_unlock(&copier->lock);
    pass(copier, AFTER_CHUNK, batch->pieces[0].job);
}

static void land(Copier* copier) {
    Batch* batch = copier->batches + (copier->landed + 1) % (uint64_t)copier->most;
    char why[WHY];
    int failed = batch->has_event && check(&copier->driver, copier->driver.event_synchronize(batch->event), "cuEventSynchronize", why);
    for (int i = 0; !failed && i < batch->num_pieces; i++)
        if (batch->pieces[i].end == batch->pieces[i].job->bytes) pass(copier, BEFORE_DONE, batch->pieces[i].job);
    double ns = failed ? 0 : time_of(copier, batch);
    pthread_mutex_lock(&copier->lock);
    copier->landed++;
    adapt(copier, ns);
    copier->num_flying -= batch->num_chunks;
    for (int i = 0; i < batch->num_pieces; i++) {
        Piece piece = batch->pieces[i];
        if (failed) fail_job(piece.job, why);
        else if (!piece.job->failed) copier->copied_bytes += (int64_t)(piece.end - piece.first);
        if (piece.end == piece.job->bytes && !piece.job->failed && !piece.job->cancelled) piece.job->copied = 1;
        piece.job->holds--;
    }
    settle_all(copier);
    pthread_mutex_unlock(&copier->lock);
}

static void end_device(Copier* copier) {
    CUcontext popped;
    for (int i = 0; i < copier->most; i++)
        if (copier->batches[i].event != NULL) copier->driver.event_destroy(copier->batches[i].event);
    if (copier->stream != NULL) copier->driver.stream_destroy(copier->stream);
    copier->driver.context_pop(&popped);
    copier->driver.context_release(copier->device);
}

static void* work(void* argument) {
    Copier* copier = argument;
    char why[WHY];
    int mode = CAPTURE_MODE_RELAXED, issues;
    if (copier->queues && check(&copier->driver, copier->driver.context_push(copier->context), "cuCtxPushCurrent", why)) die(copier, why);
    if (copier->queues) copier->driver.capture_mode(&mode); /* another thread's capture is none of this thread's calls' business */
    for (;;) {
        pthread_mutex_lock(&copier->lock);
        while (!copier->died && !copier->closing && copier->issued == copier->landed && next_job(copier) == NULL)
            pthread_cond_wait(&copier->changed, &copier->lock);
        if (copier->issued == copier->landed) copier->run = 0;
        issues = !copier->died && copier->run < RUN && next_job(copier) != NULL;
        issues = issues && copier->flight - copier->num_flying >= (copier->flight + 1) / 2;
        int lands = copier->issued != copier->landed;
        pthread_mutex_unlock(&copier->lock);
        if (issues) issue(copier);
        else if (lands) land(copier);
        else break;
    }
    if (copier->queues) end_device(copier);
    pthread_mutex_lock(&copier->lock);
    copier->thread_ended = 1;
    pthread_cond_broadcast(&copier->changed);
    pthread_mutex_unlock(&copier->lock);
    return NULL;
}

#endif
