-- What SQLite had at revision 0006, from which migrations are tested.
CREATE TABLE audit (
    id INTEGER NOT NULL,
    at FLOAT NOT NULL,
    actor VARCHAR(100) NOT NULL,
    action VARCHAR(64) NOT NULL,
    target VARCHAR(300) NOT NULL,
    address VARCHAR(64) NOT NULL,
    status INTEGER NOT NULL,
    detail TEXT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE checkpoints (
    path VARCHAR(300) NOT NULL,
    run_id VARCHAR(100) NOT NULL,
    kind VARCHAR(32) NOT NULL,
    base_model VARCHAR(200) NOT NULL,
    folder TEXT NOT NULL,
    version VARCHAR(200) NOT NULL,
    step BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    optimizer BOOLEAN NOT NULL,
    owner VARCHAR(100) NOT NULL,
    public BOOLEAN NOT NULL,
    user_metadata JSON,
    created_at FLOAT NOT NULL,
    expires_at FLOAT,
    expired_at FLOAT,
    PRIMARY KEY (path)
);
CREATE TABLE custom_losses (
    id VARCHAR(100) NOT NULL,
    session_id VARCHAR(64) NOT NULL,
    name VARCHAR(200) NOT NULL,
    definition BLOB NOT NULL,
    created_at FLOAT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE data_directory (
    id VARCHAR(32) NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE keys (
    id VARCHAR(32) NOT NULL,
    digest BLOB NOT NULL,
    owner VARCHAR(100) NOT NULL,
    role VARCHAR(16) NOT NULL,
    name VARCHAR(100) NOT NULL,
    created_at FLOAT NOT NULL,
    expires_at FLOAT,
    revoked_at FLOAT,
    last_used_at FLOAT,
    PRIMARY KEY (id)
);
CREATE TABLE models (
    name VARCHAR(200) NOT NULL,
    path TEXT NOT NULL,
    max_length INTEGER,
    added_at FLOAT NOT NULL,
    PRIMARY KEY (name)
);
CREATE TABLE operations (
    run_id VARCHAR(100) NOT NULL,
    seq_id BIGINT NOT NULL,
    kind VARCHAR(32) NOT NULL,
    state VARCHAR(16) NOT NULL,
    request BLOB NOT NULL,
    digest BLOB,
    accepted_at FLOAT NOT NULL,
    ended_at FLOAT,
    error_type VARCHAR(64) NOT NULL,
    error TEXT NOT NULL,
    media VARCHAR(16) NOT NULL,
    result BLOB,
    PRIMARY KEY (run_id, seq_id)
);
CREATE TABLE released_folders (
    folder TEXT NOT NULL,
    run_id VARCHAR(100) NOT NULL
);
CREATE TABLE runs (
    id VARCHAR(100) NOT NULL,
    session_id VARCHAR(64) NOT NULL,
    base_model VARCHAR(200) NOT NULL,
    training JSON,
    owner VARCHAR(100) NOT NULL,
    project_id VARCHAR(200) NOT NULL,
    state VARCHAR(16) NOT NULL,
    error_type VARCHAR(64) NOT NULL,
    reason TEXT NOT NULL,
    user_metadata JSON,
    created_at FLOAT NOT NULL,
    ended_at FLOAT,
    PRIMARY KEY (id)
);
CREATE TABLE sampling_sessions (
    id VARCHAR(100) NOT NULL,
    session_id VARCHAR(64) NOT NULL,
    kind VARCHAR(16) NOT NULL,
    base_model VARCHAR(200) NOT NULL,
    model_path TEXT NOT NULL,
    run_id VARCHAR(100) NOT NULL,
    version VARCHAR(200) NOT NULL,
    state VARCHAR(16) NOT NULL,
    clients INTEGER NOT NULL,
    created_at FLOAT NOT NULL,
    ended_at FLOAT,
    PRIMARY KEY (id)
);
CREATE TABLE sessions (
    id VARCHAR(64) NOT NULL,
    state VARCHAR(16) NOT NULL,
    reason VARCHAR(32) NOT NULL,
    detail TEXT NOT NULL,
    display_name TEXT,
    user_metadata JSON,
    tags JSON,
    project_id VARCHAR(200) NOT NULL,
    owner VARCHAR(100) NOT NULL,
    sdk_version VARCHAR(64) NOT NULL,
    created_at FLOAT NOT NULL,
    ended_at FLOAT,
    PRIMARY KEY (id)
);
CREATE TABLE training_steps (
    run_id VARCHAR(100) NOT NULL,
    seq_id BIGINT NOT NULL,
    step BIGINT NOT NULL,
    at FLOAT NOT NULL,
    seconds FLOAT NOT NULL,
    tokens BIGINT NOT NULL,
    weight_version VARCHAR(200) NOT NULL,
    metrics JSON NOT NULL,
    PRIMARY KEY (run_id, seq_id)
);
CREATE TABLE usage (
    hour BIGINT NOT NULL,
    event VARCHAR(32) NOT NULL,
    subject VARCHAR(100) NOT NULL,
    run_id VARCHAR(100) NOT NULL,
    session_id VARCHAR(64) NOT NULL,
    project_id VARCHAR(200) NOT NULL,
    owner VARCHAR(100) NOT NULL,
    base_model VARCHAR(200) NOT NULL,
    count BIGINT NOT NULL,
    input_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    accelerator_seconds FLOAT NOT NULL,
    PRIMARY KEY (hour, event, subject)
);
CREATE TABLE weight_versions (
    name VARCHAR(200) NOT NULL,
    run_id VARCHAR(100) NOT NULL,
    base_model VARCHAR(200) NOT NULL,
    path TEXT NOT NULL,
    parent VARCHAR(200) NOT NULL,
    step BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    adapter BOOLEAN NOT NULL,
    created_at FLOAT NOT NULL,
    collected_at FLOAT,
    PRIMARY KEY (name)
);
CREATE TABLE workers (
    id VARCHAR(100) NOT NULL,
    kind VARCHAR(16) NOT NULL,
    session_id VARCHAR(64) NOT NULL,
    run_id VARCHAR(100) NOT NULL,
    state VARCHAR(16) NOT NULL,
    reason TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started_at FLOAT NOT NULL,
    ended_at FLOAT,
    PRIMARY KEY (id)
);
CREATE INDEX sessions_by_state ON sessions (state);
CREATE INDEX sessions_by_project ON sessions (project_id);
CREATE INDEX sessions_by_owner ON sessions (owner, created_at);
CREATE INDEX runs_by_owner ON runs (owner, created_at);
CREATE INDEX runs_by_state ON runs (state);
CREATE INDEX runs_by_session ON runs (session_id);
CREATE INDEX operations_by_end ON operations (ended_at);
CREATE INDEX operations_with_result ON operations (ended_at) WHERE result IS NOT NULL;
CREATE INDEX sampling_sessions_by_session ON sampling_sessions (session_id, state);
CREATE INDEX weight_versions_by_run ON weight_versions (run_id);
CREATE INDEX checkpoints_by_expired ON checkpoints (expired_at);
CREATE INDEX checkpoints_by_owner ON checkpoints (owner, created_at);
CREATE INDEX checkpoints_by_expiry ON checkpoints (expires_at);
CREATE INDEX checkpoints_by_run ON checkpoints (run_id);
CREATE INDEX released_folders_by_run ON released_folders (run_id);
CREATE INDEX custom_losses_by_session ON custom_losses (session_id);
CREATE INDEX workers_by_state ON workers (state);
CREATE INDEX usage_by_session ON usage (session_id);
CREATE INDEX audit_by_time ON audit (at);
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO alembic_version VALUES ('0006');
